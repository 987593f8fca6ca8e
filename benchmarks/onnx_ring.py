"""One ring of keys in ONNX Runtime: ScatterND, a mask and Attention as `dynattn export` writes them, beside one
GroupQueryAttention with `sliding_window_cache=1`.

    python benchmarks/onnx_ring.py [--threads 1] [--rounds 200] [--runs 3]

Each run is a process of its own. There both are checked against attention in float64, over a prompt in pieces and tokens
one by one, then timed in turn; one that is wrong is not timed. A row has the median of each, and the median of their
ratio in a turn, which other programs on the machine disturb less. Rows: benchmarks/results/onnx_ring.csv, which chapter
68 reads."""
import argparse, statistics, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper
sys.path.insert(0, str(Path(__file__).parent))
from dynattn.export import graph as ours
from harness import append

D, HEADS, KEY_HEADS = 64, 3, 1

def session(nodes, inputs, outputs, constants, threads):
    graph = helper.make_graph(nodes, 'ring', inputs, outputs, initializer=constants)
    opsets = [helper.make_opsetid('', 24), helper.make_opsetid('com.microsoft', 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return ort.InferenceSession(model.SerializeToString(), options, providers=['CPUExecutionProvider'])

def info(name, shape, kind='FLOAT'): return helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape)

class Scatter:
    "Today's nodes; the cache is input and output in the same memory."
    def __init__(self, width, piece, threads):
        self.slots = width+piece
        g = ours._Graph()
        for name, heads in (('q', HEADS), ('k', KEY_HEADS), ('v', KEY_HEADS)): g.port(name, [1, heads, 's', D])
        g.port('past', [1], 'INT64')
        n = g.op('Shape', 'q', start=2, end=3)
        steps = g.op('Range', np.array(0), g.op('Squeeze', n, np.array([0])), np.array(1))
        position = g.op('Add', steps, 'past')
        last = g.op('Sub', g.op('Add', 'past', n), np.array([1]))
        clock = SimpleNamespace(position=position, last=last, rings={}, indices={})
        attention = SimpleNamespace(head_dim=D, scaling=D**-.5)
        out = ours._attend(g, clock, 0, width, KEY_HEADS, 0, piece, attention, ['q', 'k', 'v'])
        outputs = [info(out, [1, HEADS, 's', D]), *g.outputs]
        self.session = session(g.nodes, g.inputs, outputs, g.constants, threads)
        self.out, self.caches = out, [c['name'] for c in g.caches]

    def start(self):
        self.binding = self.session.io_binding()
        for name in self.caches:
            value = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, KEY_HEADS, self.slots, D), np.float32))
            self.binding.bind_ortvalue_input(name, value)
            self.binding.bind_ortvalue_output(f'new_{name}', value)

    def __call__(self, q, k, v, past): # [1,H,s,d]
        for name, x in dict(q=q, k=k, v=v, past=np.array([past])).items(): self.binding.bind_cpu_input(name, x)
        self.binding.bind_output(self.out)
        self.session.run_with_iobinding(self.binding)
        return self.binding.get_outputs()[-1].numpy()

class Node:
    "One node, which drops old keys itself."
    def __init__(self, width, piece, threads):
        self.slots = width+piece
        node = helper.make_node('GroupQueryAttention', ['q', 'k', 'v', 'keys', 'values', 'last', 'total'], ['out', 'new_keys', 'new_values'],
                                domain='com.microsoft', num_heads=HEADS, kv_num_heads=KEY_HEADS, scale=D**-.5,
                                local_window_size=width+1, sliding_window_cache=1)
        inputs = [info('q', [1, 's', HEADS*D]), info('k', [1, 's', KEY_HEADS*D]), info('v', [1, 's', KEY_HEADS*D]),
                  *(info(name, [1, KEY_HEADS, 'c', D]) for name in ('keys', 'values')), info('last', [1], 'INT32'), info('total', [], 'INT32')]
        outputs = [info('out', [1, 's', HEADS*D]), *(info(f'new_{name}', [1, KEY_HEADS, 'c', D]) for name in ('keys', 'values'))]
        self.session = session([node], inputs, outputs, [], threads)

    def start(self):
        self.binding = self.session.io_binding()
        for name in ('keys', 'values'):
            value = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, KEY_HEADS, self.slots, D), np.float32))
            self.binding.bind_ortvalue_input(name, value)
            self.binding.bind_ortvalue_output(f'new_{name}', value)

    def __call__(self, q, k, v, past):
        s = q.shape[2]
        packed = {name: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(1, s, -1) for name, x in (('q', q), ('k', k), ('v', v))}
        packed |= dict(last=np.array([past+s-1], np.int32), total=np.array(past+s, np.int32))
        for name, x in packed.items(): self.binding.bind_cpu_input(name, x)
        self.binding.bind_output('out')
        self.session.run_with_iobinding(self.binding)
        return self.binding.get_outputs()[-1].numpy().reshape(1, s, HEADS, D).transpose(0, 2, 1, 3)

def exact(q, k, v, width):
    n = q.shape[2]
    scores = np.einsum('bhid,bgjd->bhij', q.astype(float), k.astype(float))*D**-.5
    i, j = np.arange(n)[:,None], np.arange(n)[None]
    scores = np.where((j<=i) & (i-j<=width), scores, -np.inf)
    p = np.exp(scores-scores.max(-1, keepdims=True))
    return np.einsum('bhij,bgjd->bhid', p/p.sum(-1, keepdims=True), v.astype(float))

def tensors(n):
    draw = np.random.default_rng(0)
    return [draw.standard_normal((1, heads, n, D)).astype(np.float32) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]

def check(run, width, piece):
    "The largest error, and where it stands, over pieces of a prompt and then tokens."
    n = 3*(width+piece)
    qkv = tensors(n)
    sizes = [piece]*(2*(width+piece)//piece)
    sizes += [1]*(n-sum(sizes))
    run.start()
    past, errors, want = 0, {'pieces': 0., 'tokens': 0.}, exact(*qkv, width)
    for s in sizes:
        got = run(*(np.ascontiguousarray(x[:,:,past:past+s]) for x in qkv), past)
        kind = 'pieces' if s>1 else 'tokens'
        errors[kind] = max(errors[kind], float(abs(got-want[:,:,past:past+s]).max()))
        past += s
    return errors

FIELDS = 'onnxruntime width piece threads rounds kind ring_ms node_ms ratio ring_error node_error'.split()
SAME = 'date', 'machine', 'torch', 'commit'
MOST = 5e-6     # the largest error of a float32 output that is right; the values are of order 1

def in_turn(runs, piece, past, rounds):
    "Milliseconds of each, turn by turn."
    qkv,ms = tensors(piece),{name: [] for name in runs}
    for run in runs.values(): run(*qkv, past)
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(*qkv, past)
            ms[name].append(1e3*(time.perf_counter()-start))
    return ms

def rows_of_a_width(width, piece, threads, rounds):
    "A row for pieces of a prompt, and one for tokens."
    runs = dict(ring=Scatter(width, piece, threads), node=Node(width, piece, threads))
    errors = {name: check(run, width, piece) for name, run in runs.items()}
    for kind, size in (('pieces', piece), ('tokens', 1)):
        wrong = {name: found[kind] for name, found in errors.items() if not found[kind]<=MOST}
        if wrong: raise ValueError(f'width {width}, {kind}: expected errors of at most {MOST}, got {wrong}')
        ms = in_turn(runs, size, 4*(width+piece), rounds)
        ratio = statistics.median(node/ring for node, ring in zip(ms['node'], ms['ring']))
        yield dict(onnxruntime=ort.__version__, width=width, piece=piece, threads=threads, rounds=rounds, kind=kind,
                   **{f'{name}_ms': f'{statistics.median(x):.4f}' for name, x in ms.items()}, ratio=f'{ratio:.3f}',
                   **{f'{name}_error': f'{found[kind]:.1e}' for name, found in errors.items()})

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--threads', type=int, default=1)
    a.add_argument('--rounds', type=int, default=200)
    a.add_argument('--runs', type=int, default=3, help='processes, one after the other')
    a.add_argument('--widths', type=int, nargs='+', default=[64, 256, 1024])
    a.add_argument('--to', default='onnx_ring.csv', help='a file of benchmarks/results, or an absolute path')
    given = a.parse_args()
    if given.runs>1:
        again = [sys.executable, *sys.argv, '--runs', '1']
        for _ in range(given.runs): subprocess.run(again, check=True)
        return
    torch.set_num_threads(given.threads)        # the row names them
    for width in given.widths:
        for row in rows_of_a_width(width, 64, given.threads, given.rounds):
            append(given.to, [row], [*SAME, *FIELDS])
            print(row, flush=True)

if __name__=='__main__': main()
