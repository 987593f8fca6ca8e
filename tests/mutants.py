"""Faults put into the package on purpose, one at a time: does `make test` notice each of them?

    python tests/mutants.py                 # all, some ten minutes; exit status 1 where one survives
    python tests/mutants.py window alpha    # those of these modules
    python tests/mutants.py --list

A mutant is a piece of a module's text, which stands in it once, and what takes its place; it is put into a copy of the
project, in the module and in the notebook it comes from, and the tests named in `TESTS` run there until one fails.
`test_mutants.py` fails where a text is no longer found: then choose another place for the same fault."""
import json, os, re, shutil, subprocess, sys, tempfile, time
from pathlib import Path
import check

ROOT = Path(__file__).resolve().parents[1]

MUTANTS = [ # module, its text, the fault
    # which tokens are real
    ('padding', 'torch.arange(n, device=lengths.device) < lengths[:,None]', 'torch.arange(n, device=lengths.device) <= lengths[:,None]'),
    ('padding', 'scores = scores.masked_fill(~keep, -torch.inf)', 'scores = scores.masked_fill(~keep, -1e4)'),
    ('padding', ".softmax(dim).masked_fill(empty, 0)", ".softmax(dim)"),
    ('padding', 'return PaddingMask(~_binary(mask))', 'return PaddingMask(_binary(mask))'),
    ('padding', 'if not holds((mask==0) | (mask<=-1000)):', 'if not holds((mask==0) | (mask<=-1)):'),
    ('padding', 'return PaddingMask(self.keep & other.keep)', 'return PaddingMask(self.keep | other.keep)'),
    ('padding', 'return torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).int()', 'return torch.nn.functional.pad(self.counts.cumsum(0), (0, 1)).int()'),
    ('padding', 'return x.new_full((B*N, *x.shape[1:]), fill)', 'return x.new_full((B*N, *x.shape[1:]), 0)'),
    # curves and what makes masks of them
    ('curve', 'if curve=="bell": return sigma*math.sqrt(-2*math.log(T))', 'if curve=="bell": return sigma*math.sqrt(-math.log(T))'),
    ('curve', 'return (2*h.ceil()-1).clamp_min(0).long()', 'return (2*h.floor()+1).clamp_min(0).long()'),
    ('curve', 'return normal(x, sigma)*((x/sigma)**2 - 1)/sigma', 'return normal(x, sigma)*((x/sigma)**2 + 1)/sigma'),
    ('smoothing', 'return torch.where(V>T, V, fill)', 'return torch.where(V>=T, V, fill)'),
    ('smoothing', 'return torch.where(r<0, 0., torch.where(r>1, 1., r))', 'return torch.where(r<0, 0., r)'),
    ('smoothing', 'return torch.relu(V-T)/(1-T)', 'return torch.relu(V-T)'),
    ('smoothing', 'return torch.where(V>T, self.p*(1-t**2)/((1-T)*math.tanh(self.p)), 0.)', 'return self.p*(1-t**2)/((1-T)*math.tanh(self.p))'),
    ('smoothing', 'return normal(x, s).clamp(max=1) if capped else normal(x, s)', 'return normal(x, s)'),
    ('smoothing', '.clamp(max=1)', '.clamp(max=2)'),
    ('smoothing', 'return torch.where(normal(x, s)<1, dnormal(x, s), 0.) if capped else dnormal(x, s)', 'return dnormal(x, s)'),
    ('smoothing', 'return crossing(s, eps, "bell") if T is None', 'return crossing(s, .5, "bell") if T is None'),
    # widths
    ('sigma', 'return floor + scale*_LINKS[link](z)', 'return scale*_LINKS[link](z)'),
    ('sigma', "most = 1 if link==\"sigmoid\" else torch.inf", "most = torch.inf"),
    ('sigma', 'self.linear.weight.zero_()', 'pass'),
    ('sigma', 'self.scale, self.floor).movedim(-1, 1)', 'self.scale, self.floor)'),
    ('sigma', 'return x.masked_fill(~padding.keep[...,None], 0)', 'return x'),
    # windows
    ('window', 'keep = offsets.abs() < edge', 'keep = offsets.abs() <= edge'),
    ('window', 'if w.curve=="bell": keep = keep | (offsets==0)', 'pass'),
    ('window', 'if left is not None: keep = keep & (offsets>=-left)', 'if left is not None: keep = keep & (offsets>-left)'),
    ('window', 'return 2/max(n, 1)', 'return 1/max(n, 1)'),
    ('window', '(edge.ceil().long()-1).clamp(min=0)', 'edge.long()'),
    ('window', 'h.masked_fill(ignored, 0.).sum()/(~ignored).sum().clamp_min(1)', 'h.masked_fill(ignored, 0.).mean()'),
    # entmax
    ('alpha', "return eps + (eps==0).to(eps.dtype)*_TINY", "return eps"),
    ('alpha', '_powers(x-middle, eps)[0]))>=1', '_powers(x-middle, eps)[0]))<=1'),
    ('alpha', 'return weights.masked_fill_(empty, 0.)', 'return weights'),
    ('alpha', 'if not wants_alpha: return dscores, None\n', 'if not wants_alpha or not isinstance(eps, Tensor) and eps==1: return dscores, None\n'),
    ('alpha', 'dscores = slopes*(g - total(_row_sum(slopes*g))/divisor)', 'dscores = slopes*(g - total(_row_sum(slopes*g)))'),
    ('alpha', 'lowered = _phi(log2*math.log(2), eps)*deps', 'lowered = _phi(log2, eps)*deps'),
    ('sparsity', 'scores>=largest.amin(dim, keepdim=True)', 'scores>largest.amin(dim, keepdim=True)'),
    ('sparsity', '1+torch.sigmoid(self.a if x is None else self.read(self.proj, x))', 'torch.sigmoid(self.a if x is None else self.read(self.proj, x))'),
    # who sees whom
    ('parts', 'leads,leading = (0 <= i) & (i < n_global),j < n_global', 'leads,leading = i < n_global,j < n_global'),
    ('parts', 'if left  is not None: see = see & (off >= -left)', 'if left  is not None: see = see & (off > -left)'),
    ('parts', 'if is_causal: see = see & (off <= 0)', 'if is_causal: see = see & (off < 1 + q_offset)'),
    ('parts', 'i,j = i - first_places(keys, segments),_places(keys)', 'i,j = i,_places(keys)'),
    ('parts', 'rel_bias[..., off.clamp(-r, r) + r]', 'rel_bias[..., off.clamp(-r, r) - r]'),
    ('parts', 'x[row:row+1] if len(x)>1 else x', 'x[:1]'),
    ('parts', 'x.repeat_interleave(h//x.shape[1], dim=1)', 'x.repeat(1, h//x.shape[1], 1, 1)'),
    # the oracle
    ('engine.dense', 'if q.dtype==torch.float16: q,k = q.float(),k.float()', 'pass'),
    ('engine.dense', 'scores = call.softcap*torch.tanh(scores/call.softcap)', 'scores = torch.tanh(scores/call.softcap)'),
    ('engine.dense', '.masked_fill(everywhere, 1.).to(x.dtype)', '.to(x.dtype)'),
    ('engine.dense', 'if sink is not None: weights = weights[...,:-1]', 'if sink is not None: weights = weights[...,1:]'),
    ('engine.dense', 'return x.masked_fill(~see.any(-2)[...,None], 0.)', 'return x'),
    ('engine.dense', 'return torch.logsumexp(scores, -1).masked_fill(empty, torch.inf)', 'return torch.logsumexp(scores, -1)'),
    # the record of a call
    ('engine.call', 'call.alpha = None if alpha == 1 else alpha', 'call.alpha = alpha'),
    ('engine.call', "shift = m-n if bias.variant.name == 'LOWER_RIGHT' else 0", "shift = 0"),
    ('engine.call', 'if mask.is_floating_point() and not call.takes_zero_one and _is_zero_one(mask):', 'if False:'),
    ('engine.call', 'at, right=True)[None]', 'at)[None]'),
    ('engine.call', 'call.sink = sink.to(torch.promote_types(sink.dtype, _accumulates(call.q)))', 'call.sink = sink.abs()'),
    # what a call holds, and who serves it
    ('engine.fields', 'if name not in served.split()}', 'if name in served.split()}'),
    ('engine.fields', 'is not x and (x is None or value!=x):', 'is not x and x is None:'),
    ('engine.fields', 'if axes<2}', 'if axes<1}'),
    ('engine.plan', 'left=-1 if left is None else left', 'left=left or -1'),
    ('engine.plan', 'right = min(right, 0) if isinstance(right, int)', 'right = right if isinstance(right, int)'),
    ('engine.plan', 'softcap=call.softcap or 0.', 'softcap=0.'),
    ('engine.operator', 'ctx.needs_input_grad[1:1+len(LEARNS)]', 'ctx.needs_input_grad[:len(LEARNS)]'),
    ('engine.operator', 'if several or torch.is_grad_enabled():', 'if several:'),
    ('engine.operator', 'return unserved(call, LACKS, \'the banded path\') or refuses(call)', 'return refuses(call)'),
    ('engine.ops', 'padding n_global q_offset\')', 'padding n_global q_offset softcap\')'),
    ('engine.ops', 'if call.dropout_p>0: return True', 'pass'),
    ('engine.ops', "if of_torch: return 'dense'", "if of_torch: return 'banded'"),
    # layers
    ('modules', 'if need_weights and extra: weights = weights.roll(-extra, -1)', 'pass'),
    ('modules', 'if a.dtype==torch.bool and b.dtype==torch.bool: return a & b', 'if a.dtype==torch.bool and b.dtype==torch.bool: return a | b'),
    ('modules', 'options = dict(q_offset=extra)', 'options = dict(q_offset=0)'),
    ('modules', 'dropout = attn.dropout if attn.training else 0.', 'dropout = attn.dropout'),
    ('train.encoder', 'ids,h = ids+1,torch.zeros_like(ids)', 'ids,h = ids,torch.zeros_like(ids)'),
    ('train.encoder', 'if padding is not None: ids = ids.masked_fill(padding.ignore, self.vocab)', 'pass'),
    ('modules', 'if attn.training and attn.dropout:', 'if False:'),
    ('modules', 'if query is key: return keys,keys,values', 'if query is key: return query,keys,values'),
    # a cache
    ('cache', 'return self.start if self.reach is None else max(self.start, at-self.reach)', 'return self.start if self.reach is None else max(self.start, at-self.reach+1)'),
    ('cache', 'members.setdefault(None if None in served else max(served), []).append(head)', 'members.setdefault(None if None in served else min(served), []).append(head)'),
    ('cache', 'index = (torch.arange(n, device=x.device)+by[:,None])%n', 'index = (torch.arange(n, device=x.device)-by[:,None])%n'),
    ('cache', 'return 0 if is_padded else n_global', 'return n_global'),
    ('cache', 'row = row.clamp(0, x.shape[2]-1)[:,None,:,None]', 'row = (0*row)[:,None,:,None]'),
    # transformers
    ('hf.masks', 'return (size-1,0) if causal else (size,size)', 'return (size,0) if causal else (size,size)'),
    ('hf.masks', 'kv_offset+m<=chunk', 'kv_offset+m<=chunk+1'),
    ('hf.plugin', 'options = dict(attn_mask=s.pairs, q_offset=at, window=None, is_causal=False)', 'options = dict(attn_mask=s.pairs, q_offset=0, window=None, is_causal=False)'),
    ('hf.plugin', "if s.keep is not None: options['padding'] = PaddingMask(s.keep)", "pass"),
    ('hf.plugin', "if terms.get('softcap') is not None: own['softcap'] = terms['softcap']", "pass"),
    ('hf.curves', '.square().sum(2).double()/odds', '.square().sum(2).double()'),
    ('hf.curves', 'query = torch.arange(start, start+b', 'query = torch.arange(start+1, start+b+1'),
    ('hf.narrowing', 'for l,(head,edge) in zip(learned, before): l.sigma_head,l.edge = head,edge', 'pass'),
    ('hf.narrowing', 'return max(-(mean@of_share/square).item(), 0.) if square>0 else 0.', 'return max((mean@of_share/square).item(), 0.) if square>0 else 0.'),
    ('hf.narrowing', 'self.set(self.budget.scaled(self.widths(), share))', 'self.set(self.widths()*share)'),
    ('hf.layers', 'at = keep.int().argmax(1)[:,None,None,None]', 'at = (0*keep.int().argmax(1))[:,None,None,None]'),
    # programs
    ('audit.watch', 'inside = (back<=left) & (-back<=right)', 'inside = (back<=left+1) & (-back<=right)'),
    ('probe', 'if moved<=eps**.75: return Answer.NO', 'if moved<=eps**.25: return Answer.NO'),
    ('audit.report', "_NOT_ASKED = Outcome('not measured', 'it was not asked')", "_NOT_ASKED = Outcome('kept')"),
    ('audit.report', 'elif promised: e.findings.append(_open(question, obstacle))', 'elif promised: pass'),
    ('export.runtime', 'if got.get(name)!=expected.get(name):', 'if False:'),
    ('audit.report', 'future,more = (pairs==Answer.YES) & (back<0),(pairs==Answer.YES) & ~within', 'future,more = (pairs==Answer.YES) & (back<-1),(pairs==Answer.YES) & ~within'),
    ('train.training', 'if step<up: return top*(step+1)/up', 'if step<up: return top*step/up'),
    ('train.training', "for name in (*_PLACE, 'ms'): setattr(self, name, state[name])", "for name in ('ms',): setattr(self, name, state[name])"),
    # flash_attn's interface
    ('engine.plain', 'plan._replace(q_offset=shift+first-first_key)', 'plan._replace(q_offset=shift+first)'),
    ('engine.plan', 'for right in (False,True))\n    right = (end-1-place)', 'for right in (False,True))\n    right = (end-9-place)'),
    ('flash_attn', 'q_offsets=sizes_k-sizes_q', 'q_offsets=sizes_q-sizes_k'),
    ('flash_attn', 'at = (sizes-first)[:,None]', 'at = sizes[:,None]'),
    ('flash_attn', 'at+torch.arange(n)*local', 'at+torch.arange(n)'),
    ('flash_attn', "if asked is None or asked.lower().replace('-', '_')=='flash_attn': yield _Distribution()", 'yield _Distribution()'),
    ('train.training', 'return loss + price*sum(widths)/len(widths)*patch/ids.shape[1]', 'return loss - price*sum(widths)/len(widths)*patch/ids.shape[1]'),
]

TESTS = { # what is asked beside the module's own chapter, until the first failure; all of it is in `make test`
    'padding': ['test_padding.py'], 'curve': ['14_'], 'sigma': ['14_'],
    'smoothing': [Path(test).name for test in check.tests_of(ROOT/'nbs/12_smoothing.ipynb')],        # what `make check nb=12` runs
    'window': ['test_rim.py', 'test_search.py'], 'alpha': ['test_entmax.py', 'test_search.py'],
    'sparsity': ['test_entmax.py', '23_'], 'parts': ['25_', 'test_call.py', 'test_key_texts.py', 'test_search.py'],
    'engine': ['test_call.py', 'test_key_texts.py', 'test_search.py'], 'engine.fields': ['test_fields.py', 'test_call.py'],
    'engine.plan': ['test_key_texts.py', 'test_banded.py'], 'engine.operator': ['test_banded.py', 'test_call.py'],
    'engine.ops': ['test_call.py', 'test_banded.py'], 'modules': ['test_modules.py'],
    'flash_attn': ['test_flash_attn.py'],
    'train.encoder': ['test_rim.py', 'test_training.py'], 'cache': ['57_', 'test_cache.py'], 'hf': ['test_hf_common.py', 'test_hf.py'],
    'hf.narrowing': ['test_narrow.py'], 'hf.curves': ['test_narrow.py'], 'audit': ['test_audit.py'], 'probe': ['test_probe.py'], 'export': ['test_audit.py'], 'train': ['test_training.py']}

def module_of(name): return ROOT/'dynattn'/f"{name.replace('.', '/')}.py"

def chapter_of(module):
    "The notebook that a module is made from"
    found = re.search(r'File to edit: (?:\.\./)*(nbs/\S+\.ipynb)', module.read_text(encoding='utf-8'))
    return ROOT/found[1]

def cells_with(notebook, text):
    "Exported cells that hold a text"
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    exported = [c for c in cells if c['cell_type']=='code' and re.match(r'#\|\s*export', ''.join(c['source']))]
    return [c['id'] for c in exported if text in ''.join(c['source'])]

def problem(name, text, fault):
    "Why a mutant cannot be made; None where it can"
    if not module_of(name).exists(): return f'there is no module {name}'
    times = module_of(name).read_text(encoding='utf-8').count(text)
    if times!=1: return f'{name}: stands {times} times, not once: {text}'
    if len(cells_with(chapter_of(module_of(name)), text))!=1: return f'{name}: not in one exported cell: {text}'

LEFT_OUT = '.git', '.venv', '.matrix', '.pytest_cache', '_*site', '_proc', '_docs', '_sphinx', 'runs', '__pycache__'

def copied(folder):
    "A copy of the project"
    return Path(shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT)))

def put(folder, name, text, fault):
    "Put the fault into a copy of the project; returns how to take it out again"
    module,chapter = (folder/p.relative_to(ROOT) for p in (module_of(name), chapter_of(module_of(name))))
    before = {p: p.read_text(encoding='utf-8') for p in (module, chapter)}
    cell_id, = cells_with(chapter_of(module_of(name)), text)
    notebook = json.loads(before[chapter])
    for cell in notebook['cells']:
        if cell['id']==cell_id: cell['source'] = ''.join(cell['source']).replace(text, fault).splitlines(True)
    module.write_text(before[module].replace(text, fault), encoding='utf-8')
    chapter.write_text(json.dumps(notebook), encoding='utf-8')
    def take_out():
        for p,was in before.items(): p.write_text(was, encoding='utf-8')
    return take_out

def killed_by(folder, name):
    "The first test that fails in `folder`, or None"
    others = TESTS.get(name) or TESTS[name.split('.')[0]]
    chapters = [chapter_of(module_of(name)).name, *(n for n in others if not n.endswith('.py'))]
    files = [f'tests/{n}' for n in others if n.endswith('.py')]
    env = {**os.environ, 'PYTHONPATH': str(folder), 'OMP_NUM_THREADS': '1'}
    for asked in (['tests/test_notebooks.py', '-k', ' or '.join(chapters)], files):
        if not asked: continue
        command = [sys.executable, '-m', 'pytest', '-x', '-q', '-n', '0', '-p', 'no:cacheprovider', *asked]
        r = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if r.returncode not in (0, 1): sys.exit(f'pytest could not run:\n{r.stdout}{r.stderr}')
        if r.returncode: return re.search(r'^(?:FAILED|ERROR) (\S+)', r.stdout, re.M)[1]

def main(*wanted):
    if unknown := set(wanted)-{m[0] for m in MUTANTS}: sys.exit(f"modules: expected some of {', '.join(sorted({m[0] for m in MUTANTS}))}, got {', '.join(unknown)}")
    chosen = [m for m in MUTANTS if not wanted or m[0] in wanted]
    broken = [p for m in chosen if (p := problem(*m))]
    if broken: sys.exit('\n'.join(broken))
    survivors = 0
    with tempfile.TemporaryDirectory() as place:
        folder = copied(Path(place)/'dynattn')
        for name,text,fault in chosen:
            began,take_out = time.monotonic(),put(folder, name, text, fault)
            found = killed_by(folder, name)
            take_out()
            survivors += found is None
            print(f"{'killed  ' if found else 'SURVIVES'} {time.monotonic()-began:4.0f} s  {name}: {text[:70]!r} -> {fault[:50]!r}  {found or ''}", flush=True)
    print(f'{len(chosen)-survivors} of {len(chosen)} killed')
    return survivors>0

if __name__=='__main__':
    if '--list' in sys.argv: print(*MUTANTS, sep='\n')
    else: sys.exit(main(*sys.argv[1:]))
