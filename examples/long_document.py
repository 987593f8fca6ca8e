"""A document of ten million bytes through an encoder, on several processes that each hold a part of it.

    torchrun --nproc-per-node 4 examples/long_document.py [--bytes 10000000] [--model runs/demo] [--double]

The document is made of the Python files of this environment. With `--model` the encoder is one that `dynattn train` has
trained; without, a fresh one with a seed. Each process prints its time and its largest memory; the last line, a mean of
all states, is the same for every number of processes, to rounding. `--double` computes in float64, `--to` appends the
numbers to a table."""
import argparse, csv, datetime, gc, resource, sysconfig, time
from pathlib import Path

def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--bytes', type=int, default=10_000_000, help='of the document [10000000]')
    p.add_argument('--model', type=Path, help='the folder of a run of `dynattn train`')
    p.add_argument('--double', action='store_true', help='float64 instead of float32')
    p.add_argument('--to', type=Path, help='a table, .csv, to which a row for each process is appended')
    return p.parse_args()

if __name__=='__main__': OPTIONS = options()  # before the imports, so that --help needs none of them
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from dynattn import parallel
from dynattn.encoder import Classifier, Encoder, EncoderConfig

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
    with path.open('a', newline='') as f:
        writer = csv.DictWriter(f, rows[0].keys(), lineterminator='\n')
        if new: writer.writeheader()
        writer.writerows(rows)

def main(a):
    dist.init_process_group('gloo', timeout=datetime.timedelta(minutes=10))
    rank,size = dist.get_rank(),dist.get_world_size()
    encoder = encoder_of(a.model).eval()
    if a.double: encoder.double()
    parallelize_module(encoder, init_device_mesh('cpu', (size,)), parallel.Halo())

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
