"""One ring of keys in ONNX Runtime: ScatterND, a mask and Attention as `dynattn export` writes them, beside one
GroupQueryAttention with `sliding_window_cache=1`.

    python benchmarks/onnx_ring.py [--threads 1] [--rounds 200]

Both are checked against attention in float64 over a prompt in pieces and tokens one by one, then timed in turn. Nothing is
written: the table goes into chapter 68."""
import argparse, statistics, time
from types import SimpleNamespace
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from dynattn.export import graph as ours

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

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--threads', type=int, default=1)
    a.add_argument('--rounds', type=int, default=200)
    a = a.parse_args()
    for width, piece in ((8, 4), (64, 64), (256, 64), (1024, 64)):
        runs = dict(ScatterND=Scatter(width, piece, a.threads), GroupQueryAttention=Node(width, piece, a.threads))
        for name, run in runs.items():
            try: print(f'width {width:5} {name:20} errors {check(run, width, piece)}', flush=True)
            except Exception as e: print(f'width {width:5} {name:20} {type(e).__name__}: {str(e)[:300]}', flush=True) # ONNX Runtime's share no class
        for kind, s in (('piece', piece), ('token', 1)):
            ms = {name: [] for name in runs}
            qkv, past = tensors(s), 4*(width+piece)
            for _ in range(a.rounds):
                for name, run in runs.items():
                    start = time.perf_counter()
                    run(*qkv, past)
                    ms[name].append(1e3*(time.perf_counter()-start))
            print(f'width {width:5} {kind}  '+'  '.join(f'{name} {statistics.median(x):.4f} ms' for name, x in ms.items()), flush=True)

if __name__=='__main__': main()
