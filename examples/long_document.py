"""A document of ten million bytes through an encoder, on several processes that each hold a part of it.

    torchrun --nproc-per-node 4 examples/long_document.py [--bytes 10000000] [--model runs/demo] [--double]

The document is made of the Python files of this environment. With `--model` the encoder is one that `dynattn train` has
trained; without, a fresh one with a seed. Each process prints its time and its largest memory; the last line, a mean of
all states, is the same for every number of processes, to rounding. `--double` computes in float64, `--to` appends the
numbers to a table. Chapter 60 tells how it works; for a model of your own, import `Halo`."""
import argparse, csv, datetime, gc, resource, sysconfig, time, zlib
from functools import partial
from pathlib import Path

def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--bytes', type=int, default=10_000_000, help='of the document [10000000]')
    p.add_argument('--model', type=Path, help='the folder of a run of `dynattn train`')
    p.add_argument('--double', action='store_true', help='float64 instead of float32')
    p.add_argument('--to', type=Path, help='a table, .csv, to which a row for each process is appended')
    return p.parse_args()

if __name__=='__main__': OPTIONS = options()  # before the imports, so that --help needs none of them
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from dynattn import Classifier, Encoder, EncoderConfig, PaddingMask, SigmaHead, parallel

NOT_ACROSS = dict(dropout_p=(0., '; set dropout=0 or call eval()'), return_weights=(False, ''),
                   attn_mask=(None, '; use padding or a window'), q_offset=(0, ''), segments=(None, ''))

def of_a_part(q, k, v, **options):
    "The function that a module calls instead of its attention."
    for name,(expected,advice) in NOT_ACROSS.items():
        given = options.pop(name, expected)
        if isinstance(given, Tensor): given = 'a tensor'
        if given!=expected: raise ValueError(f"{name}: expected {expected} across ranks, got {given}{advice}")
    return parallel.attention(q, k, v, sums=False, **options)

def those_of_rank_0(head, inputs, sigma, group):
    "Widths predicted from the first token, which rank 0 holds."
    return parallel.from_rank(sigma, 0, group)

def attend_across(module, group):
    "Let an attention module work on a part of the sequence."
    if not hasattr(module, 'attention_fn'):
        raise TypeError("module: expected dynattn's MultiheadAttention, an "
                        f"Encoder or a Classifier, got {type(module).__name__}; "
                        "dynattn.convert makes a MultiheadAttention out of nn.MultiheadAttention")
    for name in ('bias_k','add_zero_attn'):
        extra = getattr(module, name, None)
        if extra is not None and extra is not False:
            raise ValueError(f"{name}: expected None across ranks, got one; its key would count once for each rank")
    module.attention_fn = partial(of_a_part, group=group, impl=module.impl)
    if isinstance(module.sigma_head, SigmaHead):
        module.sigma_head.register_forward_hook(partial(those_of_rank_0, group=group))

def with_cls(ranks, embed, x, keep): # -> tokens and keep, on rank 0 behind [CLS]
    "[CLS] begins as the mean of all tokens of all ranks."
    both = torch.cat([(x*keep[...,None]).sum(1), keep.sum(1, keepdim=True).to(x.dtype)], 1)
    both = sum(parallel.from_rank(both, r, ranks.group) for r in range(ranks.size))
    x = x.to(torch.promote_types(x.dtype, embed.cls.dtype))  # under autocast, as on the rank that holds [CLS]
    if ranks.rank: return x + 0*both.sum() + 0*embed.cls.sum(),keep # DistributedDataParallel finds every parameter in use
    x = torch.cat([(embed.cls+both[:,:-1]/both[:,-1:].clamp(min=1))[:,None], x], 1)
    return x,F.pad(keep, (1, 0), value=True)

def embed_part(encoder, ids, padding=None, *, group): # whole ids [B,n] and their `PaddingMask`
    "This rank's share of the tokens, and their padding; the layers are told how many tokens there are."
    ranks,embed = parallel.Ranks(group),encoder.embed
    if ids.dim()!=2: raise ValueError(f"ids: expected [B,n], got shape {tuple(ids.shape)}")
    keep = torch.ones_like(ids, dtype=torch.bool) if padding is None else padding.keep
    checksums = [zlib.crc32(x.cpu().contiguous().numpy()) for x in (ids, keep)]
    if any(other!=(ids.shape, checksums) for other in ranks.told((ids.shape, checksums), None)):
        raise ValueError("ids: expected the whole ids and padding, the same on all ranks, got others on some")
    p,cls = embed.patch,embed.cls is not None
    n = -(-ids.shape[1]//p) # tokens
    share = -(-n//ranks.size)
    first,last = min(share*ranks.rank, n),min(share*(ranks.rank+1), n)
    before = min(first*p, embed.context)
    part = slice(first*p-before, last*p)
    x = embed.tokens(ids[:,part], None if padding is None else PaddingMask(keep[:,part]))[:,before//p:]
    real,keep = keep[:,::p].sum(1),keep[:,::p][:,first:last]
    if cls: x,keep = with_cls(ranks, embed, x, keep)
    for layer in encoder.layers: layer.whole = n+cls,real+cls
    return embed.place(x, first+(cls and ranks.rank>0)), None if padding is None else PaddingMask(keep)

def classify_part(classifier, ids, padding=None, return_sigma=False, *, group):
    "`Classifier.forward`: from whole ids to logits that are the same on all ranks."
    states,sigmas = classifier.encoder(ids, padding, return_sigma=True)
    logits = classifier.head(parallel.from_rank(states[:,:1].sum(1), 0, group))
    return (logits,sigmas) if return_sigma else logits

class Halo(ParallelStyle):
    """For `parallelize_module`: a module works on a part of the sequence, across the ranks of a mesh.

    It is dynattn's `MultiheadAttention`, whose input is each rank's part, or an `Encoder`, which takes
    the whole ids on all ranks and returns the states of this rank's share. Rank 0 holds the first token, from which
    widths are predicted. A `Classifier` takes the whole ids and returns the same logits on all ranks."""
    def _apply(self, module:nn.Module, device_mesh) -> nn.Module:
        group = parallel.Ranks(device_mesh).group
        if isinstance(module, Classifier): module.forward = partial(classify_part, module, group=group)
        encoder = module.encoder if isinstance(module, Classifier) else module
        if isinstance(encoder, Encoder):
            encoder.embed.forward = partial(embed_part, encoder, group=group)
            for layer in encoder.layers: attend_across(layer.self_attn, group)
        else: attend_across(module, group)
        return module

def document(size): # -> uint8 [size]
    "The first `size` bytes of the environment's Python files, again from the beginning where they do not suffice."
    held,files = bytearray(),sorted(Path(sysconfig.get_paths()['purelib']).rglob('*.py'))
    while len(held)<size:
        for path in files:
            held += path.read_bytes()
            if len(held)>=size: break
    return torch.frombuffer(held[:size], dtype=torch.uint8)

def encoder_of(folder):
    if folder is not None: return Classifier.from_pretrained(folder).encoder
    torch.manual_seed(0)
    widths = [16., 32., 64., 128.]
    return Encoder(EncoderConfig(dim=64, heads=4, layers=2, patch=8, window='learned', init_width=widths))

def append(path, rows):
    new = not path.exists()
    with path.open('a', newline='', encoding='utf-8') as f:
        writer = csv.DictWriter(f, rows[0].keys(), lineterminator='\n')
        if new: writer.writeheader()
        writer.writerows(rows)

def main(a):
    dist.init_process_group('gloo', timeout=datetime.timedelta(minutes=10))
    rank,size = dist.get_rank(),dist.get_world_size()
    encoder = encoder_of(a.model).eval()
    if a.double: encoder.double()
    parallelize_module(encoder, init_device_mesh('cpu', (size,)), Halo())

    ids = document(a.bytes)[None]
    before = time.perf_counter()
    with torch.no_grad(): states = encoder(ids)
    took = time.perf_counter()-before
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**20
    print(f'rank {rank}: {states.shape[1]:,} tokens, {took:.1f} s, at most {memory:.2f} GiB', flush=True)
    total = torch.cat([states.double().sum((0, 1)), torch.tensor([float(states.shape[1])], dtype=torch.float64)])
    dist.all_reduce(total)
    mean = (total[:-1]/total[-1]).norm().item()
    mine = dict(rank=rank, tokens=states.shape[1], seconds=round(took, 1), gib=round(memory, 2))
    rows = [None]*size
    dist.all_gather_object(rows, mine)
    if rank==0:
        print(f'mean of all states: {mean:.12f}')
        about = dict(date=str(datetime.date.today()), torch=torch.__version__, processes=size)
        if a.to: append(a.to, [dict(about, **row, mean=f'{mean:.9f}') for row in rows])
    del encoder # it holds the group, whose threads have to end before the interpreter does (pytorch#179291)
    gc.collect()
    dist.destroy_process_group()

if __name__=='__main__': main(OPTIONS)
