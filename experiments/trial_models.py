"""Small decoders that can retrieve: trained on one core on text, facts that are asked again, and passages that come again.

The text is that of the Python environment, without the packages of `narrow_texts.csv`, by which the models are judged.
Sequences grow from 128 to 2,048 tokens, each time nearly all answers are right. The training can be stopped at any
time and goes on from its last checkpoint; weights are made, not committed.
"""
import csv, json, math, random, time, zlib
from pathlib import Path
import torch, torch.nn.functional as F
from torch import Tensor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from narrow_texts import LIST, roots, sources

VOCABULARY,BLOCK = 2048,256
STAGES = (128,256,512,1024,2048)    # tokens of a sequence
READY = .90                         # of the answers' tokens right, and the next stage begins
TOKENS = 4096                       # in a step
SHAPES = {                          # two models: the seed decides
    0: dict(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, intermediate_size=512),
    1: dict(num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)}

def corpus(limit=24_000_000, of_file=60_000):
    "Text of packages that judge nothing, each file's beginning, in an order drawn once."
    judges = {row['package'] for row in csv.DictReader(open(LIST, newline=''))}
    files = [s for s in sources() if s.package not in judges]
    random.Random(7).shuffle(files)
    prose,code = ([s for s in files if s.kind==kind] for kind in ('prose','code'))
    tops,texts,size = roots(),[],0
    for source in [*prose[:400], *code]:
        text = (tops[source.root]/source.file).read_text(encoding='utf-8', errors='replace')[:of_file]
        texts.append(text)
        size += len(text)
        if size>limit: break
    return texts

def make_tokenizer(texts):
    "A byte-level tokenizer of 2,048 tokens; digits stand alone."
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=['<s>'], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts[:600], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token='<s>', eos_token='<s>')

def prepare(folder):
    "The tokenizer and the text as one row of tokens, made once."
    folder = Path(folder)
    saved = folder/'text.pt'
    if saved.exists(): return PreTrainedTokenizerFast.from_pretrained(folder/'tokenizer'),torch.load(saved).tolist()
    folder.mkdir(parents=True, exist_ok=True)
    texts = corpus()
    tokenizer = make_tokenizer(texts)
    tokenizer.save_pretrained(folder/'tokenizer')
    ids = [i for row in tokenizer(texts).input_ids for i in [0, *row]]
    torch.save(torch.tensor(ids, dtype=torch.int16), saved.with_suffix('.new'))
    saved.with_suffix('.new').replace(saved)
    return tokenizer,ids

# --- what is remembered -----------------------------------------------------

TEMPLATES = ('The {what} of {key} is {value}.', 'One of the {what}s for {key} is: {value}.', '{key} = {value}\n',
             'VAR {key} = {value}\n', 'The special {what} for {key} is: {value}.', 'The {what} is {value}. Remember it.',
             '{key}: {value}\n', 'The pass key is {value}. Remember it. {value} is the pass key.', '{key} {value}\n')

class Lessons:
    "Draws sequences, as tokens and the weight of each as something to predict."
    def __init__(self, tokenizer, text):
        self.tokenizer,self.text = tokenizer,text
        words = [w[1:] for w in tokenizer.get_vocab() if w[0]=='Ġ' and w[1:].isascii() and w[1:].isalpha() and len(w)>4]
        self.words = sorted(words)               # one token each, after a space
        row = tokenizer.decode(text[:1_000_000]).split()
        self.names = sorted({w for w in row if w.isascii() and w.isalpha() and w.islower() and 4<len(w)<12})

    def ids(self, string): return self.tokenizer(string).input_ids

    def value(self, rng, numbers=.5):
        if rng.random()<numbers: return str(rng.randrange(10**rng.choice((2, 4, 5, 5, 7))))
        return ' '.join(rng.choices(self.words, k=rng.choice((1, 1, 2))))

    def frame(self, rng, alike=None):
        """What stands before a value and after it; with one key, or with words drawn at random. `alike`: a template and
        words for all facts of a text."""
        words = rng.choice((self.words, self.names))
        key = rng.choice((' '.join, '-'.join))(rng.choices(words, k=rng.choice((1, 2, 2))))
        if not alike and rng.random()<.25:
            around = ' '.join(rng.choices(self.words, k=rng.randrange(1, 6)))
            return f"{around} {key} {{value}} {rng.choice(self.words)}.\n".split('{value}')
        template,what = alike or (rng.choice(TEMPLATES),self.words)
        template = template.replace('{key}', key).replace('{what}', rng.choice(what))
        return ('\n'+template).split('{value}', 1)

    def filler(self, rng, n):
        start = rng.randrange(len(self.text)-n)
        return self.text[start:start+n]

    def facts(self, rng, n):
        "(time, tokens, weights) of facts and of the questions after them."
        used,events,share = 0,[],rng.random()
        several = rng.random()<.2                # values of one key, all asked at once
        alike = rng.random()<.6 and (rng.choice([t for t in TEMPLATES if '{key}' in t]),rng.choices(self.words, k=3))
        while used<share*n or not events:
            frame,number = self.frame(rng, alike),rng.choice((2, 3, 4)) if several else 1
            values,times = [self.value(rng, .8 if alike else .4) for _ in range(number)],sorted(rng.random() for _ in range(number))
            for value,t in zip(values, times):
                fact = self.ids(frame[0]+value+frame[1].replace('{value}', value))
                events.append((t, fact, [0.]*len(fact)))
                used += len(fact)
            for _ in range(rng.choice((1, 1, 2))):
                before,answer = self.ids(frame[0]),self.ids(frame[0]+', '.join(values))
                common = next((i for i,(a,b) in enumerate(zip(before, answer)) if a!=b), len(before))
                end = self.ids('.\n')
                events.append((rng.choice((rng.uniform(times[-1], 1), 1)), answer+end,
                               [0.]*common + [1.]*(len(answer)-common) + [0.]*len(end)))
                used += len(answer)+len(end)
        return events

    def chains(self, rng, n):
        "Variables that are given other variables' values; a question names the value at the end."
        used,events = 0,[]
        while used<n/3 or not events:
            names = [''.join(rng.choices('ABCDEFGHIJKLMNOPQRSTUVWXYZ', k=3)) for _ in range(rng.choice((2, 2, 3)))]
            value,times = str(rng.randrange(10**5)),sorted(rng.random() for _ in names)
            for name,given,t in zip(names, [value, *names], times):
                fact = self.ids(f'\nVAR {name} = {given}.')
                events.append((t, fact, [0.]*len(fact)))
                used += len(fact)
            cue,answer = self.ids(f'\nThe value of {names[-1]} is'),self.ids(f' {value}')
            events.append((rng.uniform(times[-1], 1), cue+answer, [0.]*len(cue)+[1.]*len(answer)))
            used += len(cue)+len(answer)
        return events

    def copies(self, rng, n):
        "Passages that come again: of the text, or of random tokens."
        used,events = 0,[]
        while used<n/2:
            m = rng.randrange(6, max(7, min(n//4, 64)))
            passage = self.filler(rng, m) if rng.random()<.5 else rng.choices(range(1, VOCABULARY), k=m)
            t = rng.random()
            events += [(t, passage, [0.]*m), (rng.uniform(t, 1), passage, [0.]*3+[1.]*(m-3))]
            used += 2*m
        return events

    def sequence(self, rng, n):
        "n tokens, and weights: above 0 at what has to be remembered, -1 at other text."
        kind = rng.choices((self.facts, self.chains, self.copies, None), (55, 10, 17, 18))[0]
        if kind is None: return self.filler(rng, n),[-1.]*n
        events = sorted(kind(rng, n), key=lambda e: e[0])
        rest = max(n-sum(len(e[1]) for e in events), 0)
        text,cuts = self.filler(rng, rest+1),sorted(rng.randrange(rest+1) for _ in events)
        ids,weights,at = [],[],0
        for cut,(_,tokens,weight) in zip(cuts, events):
            ids += text[at:cut]+tokens
            weights += [-1.]*(cut-at)+weight
            at = cut
        ids,weights = ids+text[at:rest],weights+[-1.]*(rest-at)
        return ids[:n],weights[:n]

# --- training ---------------------------------------------------------------

def _weights(q, k, i, j):
    scores = torch.bmm(q[:,i:j], k[:,:j].transpose(1, 2))
    scores[:,:,i:] += torch.full((j-i, j-i), -math.inf, dtype=q.dtype).triu(1)
    return scores.softmax(-1)

@torch.library.custom_op('dynattn_trial::causal', mutates_args=())
def causal(q:Tensor, k:Tensor, v:Tensor) -> Tensor:
    "Attention in blocks of queries, in bfloat16: PyTorch's own takes half of a step's time."
    out = torch.empty_like(q)
    for i in range(0, q.shape[1], BLOCK):
        j = min(i+BLOCK, q.shape[1])
        out[:,i:j] = torch.bmm(_weights(q, k, i, j), v[:,:j])
    return out

@torch.library.custom_op('dynattn_trial::causal_back', mutates_args=())
def causal_back(g:Tensor, q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq,dk,dv = torch.empty_like(q),torch.zeros_like(k),torch.zeros_like(v)
    for i in range(0, q.shape[1], BLOCK):
        j = min(i+BLOCK, q.shape[1])
        p,gi = _weights(q, k, i, j),g[:,i:j].contiguous()
        dv[:,:j] += torch.bmm(p.transpose(1, 2), gi)
        ds = torch._softmax_backward_data(torch.bmm(gi, v[:,:j].transpose(1, 2)), p, -1, p.dtype)
        dq[:,i:j] = torch.bmm(ds, k[:,:j])
        dk[:,:j] += torch.bmm(ds.transpose(1, 2), q[:,i:j])
    return dq,dk,dv

causal.register_fake(lambda q, k, v: torch.empty_like(q))
causal_back.register_fake(lambda g, q, k, v: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)))
causal.register_autograd(lambda ctx, g: causal_back(g, *ctx.saved_tensors),
                         setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

def _attend(module, q, k, v, mask, scaling=None, **kwargs):
    B,H,N,d = q.shape
    k,v = (x.repeat_interleave(H//x.shape[1], 1) for x in (k, v))
    q,k,v = (x.reshape(B*H, N, d).contiguous() for x in (q*scaling, k, v))
    return causal(q, k, v).view(B, H, N, d).transpose(1, 2).contiguous(),None

AttentionInterface.register('trial', _attend)
AttentionMaskInterface.register('trial', lambda *args, **kwargs: None)

def shape(seed):
    rope = dict(rope_type='default', rope_theta=1e5)
    return LlamaConfig(vocab_size=VOCABULARY, hidden_size=256, max_position_embeddings=8192, rope_parameters=rope,
                       tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, **SHAPES[seed])

class Training:
    "A model in bfloat16 with float32 copies that the optimisers move; everything that a checkpoint holds."
    def __init__(self, seed, folder, steps, decay):
        self.seed,self.steps,self.decay = seed,steps,decay
        self.path = Path(folder)/f'decoder{seed}.pt'
        self.lessons = Lessons(*prepare(folder))
        torch.manual_seed(seed)
        config = shape(seed)
        config._attn_implementation = 'trial'
        self.model = LlamaForCausalLM(config)
        self.master = [p.detach().clone() for p in self.model.parameters()]
        frequencies = self.model.model.rotary_emb.inv_freq.clone()
        self.model.bfloat16()
        self.model.model.rotary_emb.inv_freq = frequencies  # rounded, they would be other ones at far positions
        matrices = [m for m,(name,_) in zip(self.master, self.model.named_parameters()) if m.dim()==2 and 'embed' not in name]
        others = [m for m in self.master if not any(m is x for x in matrices)]
        self.optimisers = [torch.optim.Muon(matrices, lr=4e-3, weight_decay=.01, adjust_lr_fn='match_rms_adamw'),
                           torch.optim.AdamW(others, lr=2e-3, betas=(.9,.98), weight_decay=0.)]
        self.rates = [o.param_groups[0]['lr'] for o in self.optimisers]
        self.done = self.stage = 0
        self.recent,self.seconds,self.tokens = [],0.,0
        if self.path.exists(): self.restore()
        self.body = torch.compile(self.model.model, dynamic=False)

    def restore(self):
        state = torch.load(self.path)
        for m,saved in zip(self.master, state['master']): m.copy_(saved)
        for o,saved in zip(self.optimisers, state['optimisers']): o.load_state_dict(saved)
        for name in ('done','stage','recent','seconds','tokens'): setattr(self, name, state[name])
        self.copy()

    def save(self):
        state = dict(master=self.master, optimisers=[o.state_dict() for o in self.optimisers])
        state |= {name: getattr(self, name) for name in ('done','stage','recent','seconds','tokens')}
        torch.save(state, self.path.with_suffix('.new'))
        self.path.with_suffix('.new').replace(self.path)

    @torch.no_grad()
    def copy(self):
        for p,m in zip(self.model.parameters(), self.master): p.copy_(m)

    def batch(self):
        rng = random.Random(f'{self.seed}/{self.done}')
        stage = self.stage if rng.random()<.7 else rng.randrange(self.stage+1)
        n = STAGES[stage]
        rows = [self.lessons.sequence(rng, n) for _ in range(TOKENS//n)]
        return stage,torch.tensor([r[0] for r in rows]),torch.tensor([r[1] for r in rows])

    def step(self):
        start = time.process_time()
        stage,ids,weights = self.batch()
        hidden = self.body(ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[:,:-1]).float().flatten(0, 1)
        target,weights = ids[:,1:].flatten(),weights[:,1:].flatten()
        losses = F.cross_entropy(logits, target, reduction='none')
        answer,text = weights>0,weights<0
        text_loss,answer_loss = (losses[at].sum()/max(at.sum(), 1) for at in (text, answer))
        (text_loss+answer_loss).backward()
        right = (logits.detach()[answer].argmax(-1)==target[answer]).double().mean().item() if answer.any() else 1.
        self.move()
        self.recent = [*self.recent, (stage, right)][-60:]
        self.tokens += ids.numel()
        self.seconds += time.process_time()-start
        self.done += 1
        self.grow()
        return dict(step=self.done, stage=STAGES[stage], text=text_loss.item(), answers=answer_loss.item(), right=right)

    @torch.no_grad()
    def move(self):
        factor = min(1, self.done/40, max((self.steps-self.done)/self.decay, .02))
        for p,m in zip(self.model.parameters(), self.master): m.grad,p.grad = p.grad.float(),None
        torch.nn.utils.clip_grad_norm_(self.master, 1.)
        for o,rate in zip(self.optimisers, self.rates):
            o.param_groups[0]['lr'] = rate*factor
            o.step()
        self.copy()

    def grow(self):
        last = [right for stage,right in self.recent if stage==self.stage]
        if len(last)>=30 and sum(last[-30:])/30>=READY and self.stage<len(STAGES)-1:
            self.stage += 1
            self.recent = []

def finished(seed, folder):
    "The model of the last checkpoint, in float32."
    state = torch.load(Path(folder)/f'decoder{seed}.pt')
    model = LlamaForCausalLM(shape(seed))
    with torch.no_grad():
        for p,m in zip(model.parameters(), state['master']): p.copy_(m)
    return model.eval()

def train(seed, folder='runs/trial', steps=6000, decay=400, every=100):
    torch.set_num_threads(1)
    run = Training(seed, folder, steps, decay)
    rows = []
    while run.done<steps:
        rows.append(run.step())
        if run.done%20==0:
            mean = {k: sum(r[k] for r in rows)/len(rows) for k in ('text','answers','right')}
            print(run.done, STAGES[run.stage], *(f'{k} {v:.3f}' for k,v in mean.items()),
                  f'{run.tokens/run.seconds:.0f} tokens a core-second, {run.seconds/60:.1f} core-minutes', flush=True)
            rows = []
        if run.done%every==0: run.save()
    run.save()
