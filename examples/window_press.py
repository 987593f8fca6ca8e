"""Widths of a folder that `dynattn narrow` wrote, as a press of NVIDIA's kvpress, beside other presses of the same size.

    dynattn narrow MODEL --data docs --context 2048 --out runs/narrow
    python examples/window_press.py MODEL runs/narrow text.txt --ratio 0.75

The prompt is read in full, as by every press. Then each key head keeps the leading tokens and as many of the last ones as
its width says, scaled to kvpress's `compression_ratio`. Printed is the loss of the 64 tokens after the prompt.
MODEL is the stock one, not the folder in runs/. kvpress has its own range of transformers: give it an environment of its
own, in which dynattn is not needed."""
import argparse, inspect, json
from dataclasses import dataclass
from pathlib import Path

def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('model', help='the stock model: a folder or a name')
    p.add_argument('folder', help='written by dynattn narrow')
    p.add_argument('text', help='a file, longer than 64 tokens')
    p.add_argument('--ratio', type=float, default=.75, help='share of the keys that a press drops [0.75]')
    return p.parse_args()

if __name__=='__main__': OPTIONS = options()  # before the imports, so that --help needs none of them
import kvpress, torch, torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

@dataclass
class WindowPress(kvpress.BasePress):
    "Each key head keeps the leading tokens and its own number of last ones."
    folder: str # that `dynattn narrow` wrote
    compression_ratio: float = .75
    def __post_init__(self):
        result = json.loads((Path(self.folder)/'result.json').read_text(encoding='utf-8'))
        if not result['causal']: raise ValueError("folder: expected widths of a language model's key heads, got an encoder's")
        self.sinks,self.width = result['sinks'],torch.tensor(result['widths'], dtype=torch.float64).clamp(max=result['n'])

    def kept(self, n): # tokens of the prompt -> [L,H], how many each head keeps, on average the ratio's rest
        if not 0<=self.compression_ratio<=1-(self.sinks+1)/n:
            raise ValueError(f"compression_ratio: expected 0 to {1-(self.sinks+1)/n:.4f}, got {self.compression_ratio}")
        low,high = 0.,float(n)                                       # factors of the widths
        def at(factor): return (factor*self.width+1+self.sinks).clamp(max=n)
        for _ in range(60):
            middle = (low+high)/2
            low,high = (middle,high) if at(middle).mean()<(1-self.compression_ratio)*n else (low,middle)
        return at(high).round().long()

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        n,place = keys.shape[2],torch.arange(keys.shape[2])
        last = (self.kept(n)[module.layer_idx]-self.sinks)[:,None]   # [H,1]
        gone = (place>=self.sinks) & (place<n-last)                  # [H,N]
        module.masked_key_indices = gone.expand(len(keys), -1, -1).to(keys.device).nonzero(as_tuple=True)
        return keys, values

@torch.no_grad()
def loss_after(model, ids, press, tokens=64):
    "Of the last tokens, where the press has gone over the others."
    cache,n = DynamicCache(),ids.shape[1]-tokens
    takes = inspect.signature(model.forward).parameters
    past = {'cache' if 'cache' in takes else 'past_key_values': cache} # the name since transformers 5.24, and before
    with press(model): model(ids[:,:n], **past)
    steps = [model(ids[:,i:i+1], **past, position_ids=torch.tensor([[i]])) for i in range(n, n+tokens-1)]
    logits = torch.cat([step.logits[0,-1:].float() for step in steps])
    return F.cross_entropy(logits, ids[0,n+1:]).item()

def main(a):
    model,tokenizer = AutoModelForCausalLM.from_pretrained(a.model).eval(),AutoTokenizer.from_pretrained(a.model)
    ids = tokenizer(Path(a.text).read_text(encoding='utf-8'), return_tensors='pt').input_ids
    for press in (WindowPress(a.folder, a.ratio), kvpress.StreamingLLMPress(a.ratio), kvpress.KeyDiffPress(a.ratio)):
        print(f'{type(press).__name__:18} {loss_after(model, ids, press):.4f}')

if __name__=='__main__': main(OPTIONS)
