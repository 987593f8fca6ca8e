"""SmolLM2-135M-Instruct in ONNX Runtime: full, with the widths learned at a quarter of the keys, rounded, and healed.

    python benchmarks/onnx_decode.py [--threads 1] [--lengths 1024 2048 8128]
    python benchmarks/onnx_decode.py healed       learned widths, before and after healing; PyTorch beside
    python benchmarks/onnx_decode.py nodes        one attention node: the standard operator and GroupQueryAttention

A text of the standard library is read; after each length every model writes 16 more tokens, in turn. A narrowed graph is
timed only if it writes the same 64 greedy tokens as PyTorch with a WindowedCache. Rows: benchmarks/results/onnx_decode.csv
and onnx_healed.csv."""
import argparse, os, statistics, sys, time
from pathlib import Path
import numpy as np
os.environ['HF_HUB_OFFLINE'] = '1'
sys.path.insert(0, str(Path(__file__).parent))
import torch
from dynattn import hf
from dynattn.configs import cache_argument
from dynattn.hf.cache import WindowedCache
from dynattn.hf.layers import frozen
from dynattn.hf.curves import Budget
from dynattn.hf.narrowing import Distance, NarrowOptions, set_widths, without_windows
from dynattn.hf.saving import load_pretrained
from dynattn.export.graph import export
from dynattn.export.runtime import OnnxModel
from harness import own_process
from narrow import append, learned_rows, smollm2

SINKS,SIZES,NEW = 4,'64,256,512,1024,2043',16
FIELDS = 'suite model weights tokens threads prompt_s ms cache_bytes weight_bytes peak_bytes'.split()

def learned(): # widths [30][3]
    widths = [[0.]*3 for _ in range(30)]
    for r in learned_rows(.25, 0): widths[int(r['layer'])][int(r['head'])] = min(float(r['width']), 2043.)
    return widths

def rounded(widths):
    "Each width one of SIZES, within the same share."
    found = Budget(2048, SINKS, True).rounded(torch.tensor(widths).flatten(), SIZES)
    return found.clamp(max=2043.).view(30, 3).tolist()

def text(tokenizer, n):
    source = Path(argparse.__file__).read_text(encoding='utf-8')+Path(statistics.__file__).read_text(encoding='utf-8')
    return tokenizer(source)['input_ids'][:n]

def greedy(model, prompt):
    with torch.no_grad(): written = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
    return written[0,len(prompt):].tolist()

def healed(runs, threads, n=2048):
    "Widths as they were learned, and with healed weights: in PyTorch with a WindowedCache, and exported."
    model,tokenizer = load_pretrained(smollm2())
    hf.add_windows(model, n_global=SINKS)
    set_widths(model, learned())
    ids,torch_rows = text(tokenizer, n+NEW),[]
    for name in ('narrow', 'healed'):
        if name=='healed':
            files = (Path(argparse.__file__).with_name(f'{name}.py') for name in ('inspect', 'tarfile'))
            words = tokenizer(''.join(file.read_text(encoding='utf-8') for file in files))['input_ids']
            texts = [dict(input_ids=part[None]) for part in torch.tensor(words[:20*1024]).split(1024)]
            with frozen(model): done = Distance(model, texts[:16], NarrowOptions(heal=16, sinks=SINKS)).mend(texts[16:])
            if not done.kept: raise SystemExit('healed: expected an update that is kept, got none')
        out = runs/f'{name}-float32'
        export(model, out, tokenizer)
        if [*OnnxModel(out).generate(ids[:700], 64)]!=greedy(model, ids[:700]):
            raise SystemExit(f'{name}: other tokens than PyTorch')
        print(f'{name}: the same 64 tokens as PyTorch with a WindowedCache', flush=True)
        cache,ms = WindowedCache(model),[]
        with torch.no_grad():
            for at,stop in ((0, n), *((n+i, n+i+1) for i in range(NEW))):
                start = time.perf_counter()
                model(torch.tensor([ids[at:stop]]), **{cache_argument(model): cache}, logits_to_keep=1)
                ms.append(1e3*(time.perf_counter()-start))
        torch_rows.append({**dict.fromkeys(FIELDS, ''), **dict(
            suite='pytorch', model=name, weights='float32', tokens=n, threads=threads, prompt_s=round(ms[0]/1e3, 2), ms=round(statistics.median(ms[1:]), 2), cache_bytes=cache.nbytes)})
    append('onnx_healed.csv', torch_rows)
    times(runs, ids, 'float32', threads, [n], ('narrow', 'healed'), 'onnx_healed.csv')

def export_all(runs):
    "The six folders, made once; the narrowed ones are compared with PyTorch."
    model,tokenizer = load_pretrained(smollm2())
    hf.add_windows(model, n_global=SINKS)
    prompt = text(tokenizer, 700)
    for name,widths in dict(full=None, narrow=learned(), rounded=rounded(learned())).items():
        if widths: set_widths(model, widths)
        for weights in ('float32', 'int4'):
            out = runs/f'{name}-{weights}'
            if (out/'model.onnx').exists(): continue
            if widths: export(model, out, tokenizer, int4=weights=='int4')
            else:
                with without_windows(model): export(model, out, tokenizer, int4=weights=='int4')
            if widths is None or weights=='int4': continue
            if [*OnnxModel(out).generate(prompt, 64)]!=greedy(model, prompt):
                raise SystemExit(f'{name}: other tokens than PyTorch')
            print(f'{name}: the same 64 tokens as PyTorch with a WindowedCache', flush=True)
    return text(tokenizer, 8192)

def weight_bytes(folder): return sum((folder/name).stat().st_size for name in ('model.onnx', 'model.onnx.data'))

def times(runs, ids, weights, threads, lengths, names=('full', 'narrow', 'rounded'), file='onnx_decode.csv'):
    models = {name: OnnxModel(runs/f'{name}-{weights}', threads) for name in names}
    read,rows = {name: 0. for name in models},[]
    for n in lengths:
        for name,m in models.items():
            start = time.perf_counter()
            m.feed(ids[m.past:n])
            read[name] += time.perf_counter()-start
        ms = {name: [] for name in models}
        for i in range(NEW):
            for name,m in models.items():
                start = time.perf_counter()
                m.feed(ids[n+i:n+i+1])
                ms[name].append(1e3*(time.perf_counter()-start))
        for name,m in models.items():
            row = dict(suite='decode', model=name, weights=weights, tokens=n, threads=threads, prompt_s=round(read[name], 2),
                       ms=round(statistics.median(ms[name]), 2), cache_bytes=m.caches.nbytes,
                       weight_bytes=weight_bytes(runs/f'{name}-{weights}'), peak_bytes='')
            print(row, flush=True)
            rows.append(row)
    append(file, rows)

def peaks(runs, weights, tokens):
    "Resident memory of a process that reads a text, and nothing else."
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from onnx_model import OnnxModel\n"
            "m = OnnxModel(sys.argv[1], 2); m.feed([i%40000 for i in range(int(sys.argv[2]))])\n"
            "print(next(int(l.split()[1])*1024 for l in open('/proc/self/status') if l.startswith('VmHWM')))")
    rows = []
    for name in ('full', 'narrow', 'rounded'):
        folder = runs/f'{name}-{weights}'
        told = own_process('-c', code, folder, tokens)
        rows.append({**dict.fromkeys(FIELDS, ''), **dict(suite='peak', model=name, weights=weights, tokens=tokens,
                    threads=2, weight_bytes=weight_bytes(folder), peak_bytes=int(told))})
        print(rows[-1], flush=True)
    append('onnx_decode.csv', rows)

def node(kind, slots, threads):
    "A session of one attention node over a cache [1,3,slots,64] with 9 query heads: a call that adds a token."
    import onnx, onnxruntime
    from onnx import TensorProto as T, helper
    info,rng = helper.make_tensor_value_info,np.random.default_rng(0)
    shapes = dict(q=[1,1,576], k=[1,1,192], v=[1,1,192]) if kind=='GroupQueryAttention' else dict(q=[1,9,1,64], k=[1,3,1,64], v=[1,3,1,64])
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name,shape in shapes.items()}
    caches = {name: rng.standard_normal((1,3,slots,64)).astype(np.float32) for name in ('pk','pv')}
    if kind=='GroupQueryAttention':
        feeds |= dict(sl=np.array([slots-1], np.int32), tot=np.array(slots, np.int32))
        nodes = [helper.make_node(kind, ['q','k','v','pk','pv','sl','tot'], ['o','npk','npv'], domain='com.microsoft',
                                  num_heads=9, kv_num_heads=3)]
    else:
        places = [[[[0, h, slots-1]] for h in range(3)]]
        feeds |= dict(at=np.array(places, np.int64), see=np.ones((1, slots), bool))
        nodes = [helper.make_node('ScatterND', [f'p{x}','at',x], [f'np{x}']) for x in 'kv']
        nodes.append(helper.make_node('Attention', ['q','npk','npv','see'], ['o']))
    types = {np.dtype('float32'): T.FLOAT, np.dtype('int32'): T.INT32, np.dtype('int64'): T.INT64, np.dtype('bool'): T.BOOL}
    ins = [info(name, types[x.dtype], x.shape) for name,x in {**feeds, **caches}.items()]
    outs = [info('o', T.FLOAT, shapes['q'])]+[info(f'n{name}', T.FLOAT, x.shape) for name,x in caches.items()]
    opsets = [helper.make_opsetid('', 24), helper.make_opsetid('com.microsoft', 1)]
    model = helper.make_model(helper.make_graph(nodes, 'node', ins, outs), opset_imports=opsets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=['CPUExecutionProvider'])
    binding = session.io_binding()
    for name,x in {**feeds, **caches}.items(): binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(x))
    binding.bind_output('o')
    for name,x in caches.items(): binding.bind_ortvalue_output(f'n{name}', onnxruntime.OrtValue.ortvalue_from_numpy(x))
    def run():
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy().reshape(-1)
    return run

def nodes(threads):
    rows = []
    for slots in (320, 1088, 8192):
        runs = {kind: node(kind, slots, threads) for kind in ('Attention', 'GroupQueryAttention')}
        first,second = (run() for run in runs.values())
        if not np.allclose(first, second, atol=1e-5): raise SystemExit('the two operators differ')
        ms = {kind: [] for kind in runs}
        for _ in range(200):
            for kind,run in runs.items():
                start = time.perf_counter()
                run()
                ms[kind].append(1e3*(time.perf_counter()-start))
        for kind in runs:
            rows.append({**dict.fromkeys(FIELDS, ''), **dict(suite='node', model=kind, weights='float32', tokens=slots,
                                                            threads=threads, ms=round(statistics.median(ms[kind]), 4))})
            print(rows[-1], flush=True)
    append('onnx_decode.csv', rows)

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('suites', nargs='*', default=['decode', 'peak', 'nodes'], help='of decode, peak, nodes, healed (default: the first three)')
    a.add_argument('--runs', type=Path, default=Path('runs/onnx'), help='where the exported folders go')
    a.add_argument('--lengths', type=int, nargs='+', default=[1024, 2048, 8128])
    a.add_argument('--threads', type=int, nargs='+', default=[1, 2])
    args = a.parse_args()
    torch.set_num_threads(max(args.threads))
    if {'decode', 'peak'} & {*args.suites}: ids = export_all(args.runs)
    for threads in args.threads:
        if 'decode' in args.suites:
            for weights in ('float32', 'int4'): times(args.runs, ids, weights, threads, args.lengths)
        if 'nodes' in args.suites: nodes(threads)
        if 'healed' in args.suites: healed(args.runs, threads)
    if 'peak' in args.suites:
        for weights in ('float32', 'int4'): peaks(args.runs, weights, max(args.lengths))
