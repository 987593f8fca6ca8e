"""Methods of kvpress, which drop keys by what the prompt holds, asked what `narrow_trial.py export` wrote.

It runs in an environment of its own, with kvpress and a transformers of its range. A press reads the whole prompt before
it drops anything, so its footprint with the prompt is that of the full model; rows of a share have so many of the
prompt's keys left when the question comes.
"""
import argparse, inspect, json, sys
from pathlib import Path
import torch, torch.nn.functional as F
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils import logging
sys.path.append(str(Path(__file__).parents[1]/'benchmarks'))     # harness.py
from harness import append, folder_of

PRESSES = 'SnapKV','TOVA','KeyDiff','ExpectedAttention','AdaKV','StreamingLLM','KVzip'
FIELDS = ('date machine torch commit model method share seed footprint cache_share core_seconds task n distance samples '
          'score tokens_right loss right').split()

def press(name, ratio):
    import kvpress
    if name=='AdaKV': return kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio))
    return getattr(kvpress, f'{name}Press')(ratio)

@torch.no_grad()
def answered(model, press, asked):
    "The prompt, of which the press drops what it wants, then all questions."
    ids,cache,begin = torch.tensor([asked['ids']]),DynamicCache(),asked['begin']
    takes = inspect.signature(model.forward).parameters
    past = {'cache' if 'cache' in takes else 'past_key_values': cache} # the name since transformers 5.24, and before
    with press(model): model(ids[:,:begin], **past)
    at = torch.arange(begin, ids.shape[1])[None]
    logits = model(ids[:,begin:], **past, position_ids=at).logits[0].float()
    for start,stop,distance in asked['answers']:
        got,target = logits[start-1-begin:stop-1-begin],ids[0,start:stop]
        right = got.argmax(-1)==target
        yield distance,int(right.all()),right.double().mean().item(),F.cross_entropy(got, target).item()

def main(a):
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    folder_of('kvpress')
    folder = Path(a.runs)/f'exported{a.model}'
    if not (folder/'asked.json').exists(): sys.exit(f'{folder}: expected what `narrow_trial.py export` writes, got no asked.json')
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation='sdpa').eval()
    for entry in json.loads((folder/'asked.json').read_text()):
        for share in a.shares:
            for name in PRESSES:
                found = {}
                for asked in entry['texts'][:a.samples]:
                    for score in answered(model, press(name, 1-share), asked):
                        found.setdefault(min(5*score[0]//entry['n'], 4), []).append(score)
                rows = []
                for part in sorted(found):
                    distance,right,tokens,loss = (sum(x)/len(found[part]) for x in zip(*found[part]))
                    rows.append(dict(model=a.model, method=name, share=share, seed=0, footprint=1., cache_share=share,
                        core_seconds=0., task=entry['task'], n=entry['n'], distance=round(distance),
                        samples=len(found[part]), score=round(right, 4), tokens_right=round(tokens, 4),
                        loss=round(loss, 4), right=''.join(str(f[1]) for f in found[part])))
                append('narrow_trial.csv', rows, FIELDS)
                print(name, share, entry['task'], entry['n'], [r['score'] for r in rows], flush=True)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--model', default='0')
    p.add_argument('--shares', type=float, nargs='*', default=[.25])
    p.add_argument('--samples', type=int, default=20, help='texts for each task')
    p.add_argument('--runs', default='runs/trial')
    main(p.parse_args())
