"""Do the outputs that a notebook stores say what it says today, up to rounding?

`python tests/outputs.py [--store] NOTEBOOK ...` runs notebooks and lists the cells that differ; with `--store` it writes what
they say now. A cell that shows a time, or what a machine decides, begins with `#| varies: why` and is passed over, unless it
shows something of which nothing is stored. Of a widget nothing may differ: it holds a copy of its script. A picture may differ
by a pixel here and there, as letters and lines do between versions of matplotlib, and not by a label or a curve."""
import base64, io, json, math, os, re, sys
from pathlib import Path
import forked

NUMBER = re.compile(r'(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?(?!\w)')
NOISE = 1e-6        # numbers below are rounding errors of float32, of which only that they are small is compared

def said(outputs):
    "The text of a cell's outputs, and its widgets"
    text,widgets = [],[]
    for o in outputs:
        data = o.get('data', {})
        html = ''.join(data.get('text/html', ''))
        if 'dynattn-widget' in html: widgets.append(html)
        elif o['output_type']=='stream' and o['name']=='stdout': text += o['text']
        else: text += data.get('text/markdown') or data.get('text/plain') or ()
    return re.sub(r'0x[0-9a-f]{6,}', '0x', ''.join(text)), widgets

def near(a, b):
    "Do two printed numbers agree but for the last digit of the shorter one, or a thousandth?"
    x,y = (float(n.replace(',', '')) for n in (a, b))
    if max(abs(x), abs(y))<NOISE: return True
    if not {'.', 'e'} & {*a, *b}: return x==y
    def unit(n):
        digits,_,exponent = n.partition('e')
        return 10.**(int(exponent or 0)-len(digits.partition('.')[2]))
    return math.isclose(x, y, rel_tol=1e-3, abs_tol=1.01*max(unit(a), unit(b)))

def differ(stored, fresh):
    "What is different about two lists of outputs, or ''"
    if not fresh: return ''        # a comparison with a package that is not installed here
    (a,wa),(b,wb) = said(stored),said(fresh)
    if wa!=wb: return 'another widget'
    shape = [' '.join(NUMBER.sub('#', t).split()) for t in (a, b)]
    if shape[0]!=shape[1]: return f'{a.strip()}\n-- is now --\n{b.strip()}'
    far = [f'{x} is now {y}' for x,y in zip(NUMBER.findall(a), NUMBER.findall(b)) if not near(x, y)]
    return ', '.join(far)

def pictures(outputs): return [''.join(o['data']['image/png']) for o in outputs if 'image/png' in o.get('data', {})]

BLOCK,INK = 32,24       # pixels of a side of a square, and by how much its mean may change, of 255
def redrawn(stored, fresh):
    "What is different about the pictures of two lists of outputs, or ''"
    if not fresh: return ''
    old,new = pictures(stored),pictures(fresh)
    if len(old)!=len(new): return f'{len(old)} pictures are now {len(new)}'
    return ', '.join(why for a,b in zip(old, new) if a!=b and (why := changed(a, b)))

def changed(a, b):
    "How two pictures differ, or '': in size by more than a twentieth, or the mean of a square by more than `INK`"
    from PIL import Image, ImageChops
    def on_white(png):
        picture = Image.open(io.BytesIO(base64.b64decode(png))).convert('RGBA')
        return Image.alpha_composite(Image.new('RGBA', picture.size, 'white'), picture).convert('RGB')
    old,new = on_white(a),on_white(b)
    if any(abs(x-y)>.05*x for x,y in zip(old.size, new.size)): return f'a picture of {old.size} is now one of {new.size}'
    squares = [max(1, n//BLOCK) for n in old.size]
    difference = ImageChops.difference(*(picture.resize(squares, Image.Resampling.BOX) for picture in (old, new)))
    most = max(high for _,high in difference.getextrema())
    return f'another picture: a square of it changed by {most} of 255' if most>INK else ''

def forgotten(stored, fresh):
    "What is wrong where a cell shows something and nothing is stored: a page would show the code and no value"
    return 'nothing is stored of what it shows, which --store writes' if not stored and (any(said(fresh)) or pictures(fresh)) else ''

def executed(path):
    "The notebook as stored, and its cells after a run by nbdev's flags"
    from execnb.nbio import read_nb
    from execnb.shell import CaptureShell
    from nbdev.config import get_config
    from nbdev.process import NBProcessor
    skipped = set(get_config().tst_flags.split())
    sys.path.insert(0, str(forked.ROOT))
    os.environ['IN_TEST'] = '1'
    flags = [getattr(c, 'directives_', {}) or {} for c in NBProcessor(path, process=True).nb.cells]
    nb,stored = read_nb(path),json.loads(path.read_text(encoding='utf-8'))
    def passed_over(cell): return cell.cell_type!='code' or 'nbdev_export(' in cell.source or bool(skipped & flags[cell.idx_].keys())
    os.chdir(path.parent)
    CaptureShell(path).run_all(nb, exc_stop=True, preproc=passed_over)
    return stored, nb.cells

def stale(path, store=False):
    "(id of the cell, what differs) of a notebook; `store` writes what its cells say now"
    stored,cells = executed(path)
    found = []
    for old,new in zip(stored['cells'], cells):
        source = ''.join(old['source'])
        if old['cell_type']!='code' or re.search(r'^#\|\s*hide\b', source, re.M): continue
        fresh = new.outputs or []
        if why := forgotten(old['outputs'], fresh): pass
        elif re.search(r'^#\|\s*varies\b', source, re.M): continue
        else: why = differ(old['outputs'], fresh) or redrawn(old['outputs'], fresh)
        if why:
            found.append((old['id'], why))
            kept = [o for o in fresh if o.get('data', o.get('name')!='stderr')]
            old['outputs'] = [{**o, **({'execution_count': None} if o['output_type']=='execute_result' else {})} for o in kept]
    if store and found: path.write_text(json.dumps(stored, indent=1, sort_keys=True, ensure_ascii=False)+'\n', encoding='utf-8')
    return found

def run(path, flags, output):
    "In a fork: ends the process with the answer"
    import signal
    signal.alarm(1200)
    for stream in (1, 2): os.dup2(output.fileno(), stream)
    os.chdir(forked.ROOT)
    found = stale(path, store='store' in flags)
    print(*(f'{id}: {why}' for id,why in found), sep='\n', flush=True)
    os._exit(1 if found else forked.PASSED)

class Server(forked.Server):
    command = [sys.executable, __file__]

if __name__=='__main__':
    if sys.argv[1] in forked.LIGHT: forked.serve(sys.argv[1:], run)
    else:
        for name in sys.argv[1:]:
            if name=='--store': continue
            server = Server(forked.LIGHT)
            print(name, *server.run(Path(name).resolve(), ['store']*('--store' in sys.argv)), flush=True)
            server.close()
