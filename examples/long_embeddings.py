"""A folder of long documents as a matrix of embeddings, on a CPU.

    python examples/long_embeddings.py documents/ --model answerdotai/ModernBERT-base --out embeddings

The model is one of SentenceTransformers, or any encoder of transformers, whose states are then averaged. Its attention is
switched to `dynattn`, which leaves the output as it is and computes local layers and padding in the band.
`--window 1024` also limits the global layers to so many tokens on either side: that is another model, which has to be
judged. A document that is longer than the model's context is cut into pieces, whose embeddings are averaged by length.

Before the first document the largest possible batch is tried, and its memory told. `embeddings/matrix.npy` has a row for
each line of `embeddings/names.txt`; an interrupted run goes on where it stopped when it is started again."""
import argparse, sys
from pathlib import Path

def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('documents', type=Path)
    p.add_argument('--model', required=True, help='a folder or a name')
    p.add_argument('--out', type=Path, default=Path('embeddings'), help='folder of the matrix [embeddings]')
    p.add_argument('--pattern', default='*.txt', help='of the names of documents [*.txt]')
    p.add_argument('--context', type=int, help="tokens of a piece at most [the model's]")
    p.add_argument('--tokens', type=int, default=8192, help='of a batch at most, padding included [8192]')
    p.add_argument('--window', type=int, help='half-width in every layer [as the model is]')
    return p.parse_args()

if __name__=='__main__': OPTIONS = options()  # before the imports, so that --help needs none of them
import numpy as np, torch, torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from tqdm import tqdm
from dynattn import hf
from dynattn.texts import read_text

class Embedder:
    "Pieces of token ids to embeddings."
    def __init__(self, name, context, window):
        self.whole = SentenceTransformer(name, device='cpu').eval()
        model,self.tokenizer = hf.switch(self.whole[0].auto_model),self.whole.tokenizer
        if window is not None: hf.add_windows(model, init=float(window), edge='hard')
        held = self.whole.max_seq_length or 8192
        self.context = min(context or held, held)

    def pieces(self, text): # -> lists of at most `context` ids
        found = self.tokenizer(text, truncation=True, max_length=self.context, return_overflowing_tokens=True)
        return found['input_ids']

    @torch.inference_mode()
    def __call__(self, pieces): # -> [P,D]
        width = max(map(len, pieces))
        ids = torch.full((len(pieces), width), self.tokenizer.pad_token_id or 0)
        for row,piece in zip(ids, pieces): row[:len(piece)] = torch.tensor(piece)
        keep = torch.arange(width) < torch.tensor([len(p) for p in pieces])[:,None]
        return self.whole(dict(input_ids=ids, attention_mask=keep.long()))['sentence_embedding'].float()

def batches(embedder, paths, tokens):
    "Batches of (path, piece), none with more than `tokens` places, padding included."
    waiting,longest = [],0
    for path in paths:
        text,_,why = read_text(path, most=2**26)
        if text is None and why!='empty':
            print(f'{path}: left out, the file is {why}; its row is NaN', file=sys.stderr)
            continue
        for piece in embedder.pieces(text or ''):
            if waiting and max(longest, len(piece))*(len(waiting)+1) > tokens:
                yield waiting
                waiting,longest = [],0
            waiting.append((path, piece))
            longest = max(longest, len(piece))
    if waiting: yield waiting

def most_memory(): # -> GiB
    try: return int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])/2**20
    except (OSError, StopIteration): return float('nan')

def matrix(folder, names, width):
    "The rows so far, NaN where one is missing; those of other documents are refused."
    folder.mkdir(parents=True, exist_ok=True)
    listed,path = folder/'names.txt',folder/'matrix.npy'
    if listed.exists() and listed.read_text(encoding='utf-8').splitlines()!=names:
        raise SystemExit(f'--out: expected a new folder or one of the same documents, got {folder} of others')
    if path.exists(): return np.load(path, mmap_mode='r+')
    listed.write_text('\n'.join(names)+'\n', encoding='utf-8')
    rows = np.lib.format.open_memmap(path, 'w+', np.float32, (len(names), width))
    rows[:] = np.nan
    return rows

def main(a):
    found = [path for path in a.documents.rglob(a.pattern) if path.is_file() and a.out not in path.parents]
    paths = sorted(found, key=lambda path: (-path.stat().st_size, path))  # similar lengths together
    if not paths: raise SystemExit(f'documents: expected files like {a.pattern} below a folder, got none in {a.documents}')
    embedder = Embedder(a.model, a.context, a.window)
    tokens = max(a.tokens, embedder.context)
    filled = [[embedder.tokenizer.unk_token_id or 1]*embedder.context]*(tokens//embedder.context)
    width = embedder(filled).shape[1]
    print(f'{len(paths):,} documents; a batch of {tokens:,} tokens takes at most {most_memory():.2f} GiB, model included')

    names = [str(path.relative_to(a.documents)) for path in paths]
    rows,place = matrix(a.out, names, width),{path: i for i,path in enumerate(paths)}
    missing = [path for path in paths if np.isnan(rows[place[path]]).any()]
    sums = {}
    with tqdm(total=len(paths), initial=len(paths)-len(missing), unit=' documents',
              disable=not sys.stderr.isatty()) as bar:
        for batch in batches(embedder, missing, tokens):
            for (path,piece),vector in zip(batch, embedder([piece for _,piece in batch])):
                sums[path] = sums.get(path, 0.) + len(piece)*vector
            done = [path for path in sums if path!=batch[-1][0]]  # the last one may have more pieces
            for path in done: rows[place[path]] = F.normalize(sums.pop(path), dim=0)
            rows.flush()
            bar.update(len(done))
        for path,total in sums.items(): rows[place[path]] = F.normalize(total, dim=0)
        bar.update(len(sums))
    rows.flush()
    print(f'{a.out/"matrix.npy"}: {rows.shape[0]:,} rows of {rows.shape[1]}')

if __name__=='__main__': main(OPTIONS)
