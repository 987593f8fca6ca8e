"""`experiments/worth.py`: labels of the small tasks against plain loops over the ids, and a run that goes on."""
import csv, math, sys
from dataclasses import replace
from pathlib import Path
import pytest, torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT/'experiments'), str(ROOT/'benchmarks')]
import worth, worth_tasks
from worth_tasks import ASKED_NOT, TASKS

def count_by_hand(ids):
    labels = []
    for i,symbol in enumerate(ids):
        labels.append(labels[-1]+1 if i and ids[i-1]==symbol else 0)
    return labels

def two_back_by_hand(ids): return [ASKED_NOT]*2 + ids[:-2]

def flip_flop_by_hand(ids):
    "0 writes, 1 is ignored, 2 reads; 3 and 4 are bits."
    labels,kept = [],None
    for i,token in enumerate(ids):
        labels.append(kept if token==2 else ASKED_NOT)
        if i%2==0 and token==0 and i+1<len(ids): kept = ids[i+1]
        if i%2==0: assert token in (0,1,2)
        else: assert token in (3,4)
        if i%2 and ids[i-1]==2: assert token==kept
    return labels

def recall_by_hand(ids):
    "1 to 8 ask for a key; 9 to 72 are pairs, eight for each key; 73 to 80 the values that are answered."
    found = {(token-9)//8: (token-9)%8 for token in ids if token>=9}
    assert sorted(found)==list(range(8)) and sum(token>=9 for token in ids)==8
    assert all(token<9 for token in ids[len(ids)//2:]) and not any(1<=token<9 for token in ids[:len(ids)//2])
    return [73+found[token-1] if 1<=token<9 else ASKED_NOT for token in ids]

def answered_by_hand(separator, answer):
    def labels(ids):
        m = ids.index(separator)
        whole = answer(ids[:m])
        assert ids[m+1:]==whole[:-1]            # the decoder reads its own right answers
        return [ASKED_NOT]*m + whole
    return labels

BY_HAND = dict(local_count=count_by_hand, two_back=two_back_by_hand, flip_flop=flip_flop_by_hand, recall=recall_by_hand,
    copy=answered_by_hand(64, list), reverse=answered_by_hand(64, lambda s: s[::-1]), sort=answered_by_hand(8, sorted))

@pytest.mark.parametrize('name', TASKS)
@pytest.mark.parametrize('n', (32, 50, 64, 300))
def test_labels_are_those_of_a_loop(name, n):
    task = TASKS[name]
    ids,labels = task.make(torch.Generator().manual_seed(n), 5, n)
    assert ids.shape==labels.shape==(5, n) and 0<=ids.min() and ids.max()<task.vocab
    for row,asked in zip(ids.tolist(), labels.tolist()): assert asked==BY_HAND[name](row)
    asked = labels[labels!=ASKED_NOT]
    assert len(asked) and 0<=asked.min() and asked.max()<task.vocab
    if name=='local_count': assert asked.max()<worth_tasks.LONGEST_RUN
    again,_ = task.make(torch.Generator().manual_seed(n), 5, n)
    assert torch.equal(ids, again)

def test_accuracy_by_hand():
    ids = torch.tensor([[2,1,8,1], [0,0,8,0]])
    labels = torch.tensor([[ASKED_NOT,ASKED_NOT,1,2], [ASKED_NOT,ASKED_NOT,0,0]])
    predicted = torch.tensor([[9,9,1,1], [9,9,0,0]])
    plain,whole = worth_tasks.right_answers(TASKS['copy'], predicted, ids, labels)
    assert (plain,whole)==(.75,.5)
    balanced,_ = worth_tasks.right_answers(TASKS['sort'], predicted, ids, labels)
    assert balanced==pytest.approx((1/1 + 2/3)/2)      # one answer repeats, of three that change two are right

def by_hand_share(widths, n):
    "Of a causal head: the visible pairs over all pairs."
    return sum(min(i, w)+1 for w in widths for i in range(n)) / (len(widths)*n*(n+1)//2)

def test_share_of_pairs_counts_pairs():
    model = worth.Decoder(8, 1, worth.Method('fixed', 3), worth.Settings())
    model(torch.zeros(2, 20, dtype=torch.long))
    assert model.share(20)==pytest.approx(by_hand_share([3]*worth.HEADS, 20))
    model = worth.Decoder(8, 1, worth.Method('learned'), worth.Settings(init_width=5.5))
    model(torch.zeros(2, 20, dtype=torch.long))
    assert model.share(20)==pytest.approx(by_hand_share([6]*worth.HEADS, 20))

def test_rotary_scores_depend_on_the_distance():
    q,k = torch.randn(2, 8, dtype=torch.float64)
    turned = [worth.rotated(x.expand(1, 1, 12, 8)) for x in (q,k)]
    scores = (turned[0] @ turned[1].mT)[0,0]
    for distance in (0,1,5):
        same = scores.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-6, atol=1e-6)
    assert (scores[5,5]-scores[5,0]).abs()>1e-3

def plain_entmax(scores):
    "Entmax with alpha 1.5 of one row of floats, its threshold found by halving; softmax is not used anywhere."
    def weights(threshold): return [max(x/2-threshold, 0.)**2 for x in scores]
    low,high = max(scores)/2-1, max(scores)/2
    for _ in range(80):
        middle = (low+high)/2
        low,high = (middle,high) if sum(weights(middle))>1 else (low,middle)
    return weights((low+high)/2)

def plain_softmax(scores):
    powers = [math.exp(x-max(scores)) for x in scores]
    return [p/sum(powers) for p in powers]

@pytest.mark.parametrize('positions', ('none','rope','half_alibi'))
@pytest.mark.parametrize('method', (worth.METHODS['asentmax'], worth.Method(scaled=True)), ids=('entmax','softmax'))
def test_scaled_attention_is_that_of_a_loop(method, positions):
    "1 + softplus(b)*log(i)^(2*tanh(g)) times the scores, i from 2; b and g are linear in the state."
    torch.manual_seed(3)
    n,d = 11,worth.DIM//worth.HEADS
    mixer = worth.Mixer(method, worth.Settings(positions=positions)).double()
    x = 3*torch.randn(1, n, worth.DIM, dtype=torch.float64)
    q,k,v = (part.unflatten(-1, (worth.HEADS, d))[0] for part in mixer.qkv(x).chunk(3, -1))          # [N,H,d]
    if positions=='rope': q,k = (worth.rotated(t.transpose(0, 1)).transpose(0, 1) for t in (q,k))
    slopes = (1., .25, 0., 0.) if positions=='half_alibi' else (0.,)*4
    scaled = [h for h,slope in enumerate(slopes) if not slope]
    weigh = plain_entmax if method.alpha=='fixed' else plain_softmax
    expected = torch.zeros(n, worth.HEADS, d, dtype=torch.float64)
    factors = []
    for i in range(n):
        for h in range(worth.HEADS):
            factor = 1.
            if h in scaled:
                place = scaled.index(h)
                beta = (mixer.factor.beta.weight[place]@x[0,i]).item()+mixer.factor.beta.bias[place].item()
                gamma = (mixer.factor.gamma.weight[place]@x[0,i]).item()+mixer.factor.gamma.bias[place].item()
                factor = 1+math.log1p(math.exp(beta))*math.log(i+2)**(2*math.tanh(gamma))
                factors.append(factor)
            scores = [factor*(q[i,h]@k[j,h]).item()/d**.5-slopes[h]*(i-j) for j in range(i+1)]
            expected[i,h] = torch.tensor(weigh(scores), dtype=torch.float64)@v[:i+1,h]
    torch.testing.assert_close(mixer(x), mixer.out(expected.flatten(1))[None], rtol=1e-9, atol=1e-9)
    assert max(factors)-min(factors)>1 and min(factors)>1

def test_what_scales_the_scores_has_the_gradients_of_differences():
    torch.manual_seed(4)
    mixer = worth.Mixer(worth.METHODS['asentmax'], worth.Settings(positions='none')).double()
    x = torch.randn(1, 7, worth.DIM, dtype=torch.float64)
    weights = torch.randn(1, 7, worth.DIM, dtype=torch.float64)
    def value(): return (mixer(x)*weights).sum()
    value().backward()
    for parameter in (mixer.factor.beta.bias, mixer.factor.gamma.bias):
        assert parameter.grad.abs().min()>1e-6
        for h in range(worth.HEADS):
            ends = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter[h] += step
                    ends.append(value().item())
                    parameter[h] -= step
            assert parameter.grad[h].item()==pytest.approx((ends[0]-ends[1])/2e-5, rel=1e-6)

def rows_of(file):
    with open(file, newline='') as f: return list(csv.DictReader(f))

def test_a_second_run_goes_on_where_the_first_one_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, 'two_back', replace(TASKS['two_back'], steps=3))
    monkeypatch.setattr(worth, 'TESTS', {64: 4, 128: 2})
    monkeypatch.setattr(worth, 'count_cpu_time', lambda: None)
    command = ['worth.py','--suite','tasks','--task','two_back','--method','softmax','fixed','learned_alpha',
               '--seeds','1','--to',str(tmp_path)]
    monkeypatch.setattr(sys, 'argv', command)
    worth.main()
    file = tmp_path/'worth.csv'
    text,rows = file.read_text(),rows_of(file)
    assert len(rows)==2*(len(worth.WIDTHS)+3)
    assert all(r['machine'] and r['torch'] and float(r['step_ms'])>0 and float(r['infer_ms'])>0 for r in rows)
    assert next(r for r in rows if r['method']=='fixed')['width'] in map(str, worth.WIDTHS)

    worth.main()                                             # all is there: nothing is added
    assert file.read_text()==text
    lines = text.splitlines(keepends=True)
    file.write_text(''.join(lines[:-2]))                     # as if it had been stopped before the last run
    with monkeypatch.context() as bounded:
        bounded.setattr(sys, 'argv', [*command, '--limit', '0'])
        worth.main()                                         # no second is left: no run begins
    assert file.read_text()==''.join(lines[:-2])
    worth.main()
    again = rows_of(file)
    assert len(again)==len(rows)
    same = 'method seed length accuracy whole share loss'.split()
    assert [[r[k] for k in same] for r in again]==[[r[k] for k in same] for r in rows]

def test_the_long_language_model_is_another_run_than_the_short_one():
    short,long = ([worth.Run(suite, '', name, method, 0, s) for name,method,s in worth.language_runs(suite)]
                  for suite in ('language','language_long'))
    assert {r.settings.steps for r in short}=={400} and {r.settings.steps for r in long}=={1600}
    def row_of(run):
        s = {name: str(x) for name,x in vars(run.settings).items()}
        return dict(s, method=run.method_name, seed=str(run.seed), width=str(run.method.width or ''))
    rows = [row_of(r) for r in short]
    assert all(worth.is_done(r, [], rows) for r in short)
    assert not any(worth.is_done(r, [], rows) for r in long)
    assert [worth.is_done(r, [], [row_of(long[2])]) for r in long]==[i==2 for i in range(len(long))]

def test_times_are_set_beside_those_of_softmax(monkeypatch):
    monkeypatch.setattr(worth, 'COSTED', {('step', 32): 2, ('forward', 64): 1})
    built = []
    class Noted(worth.Decoder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            built.append((self, [p.clone() for p in self.parameters()]))
    monkeypatch.setattr(worth, 'Decoder', Noted)
    rows = worth.cost_rows(rounds=2)
    assert [(r['what'],r['length'],r['method']) for r in rows]==[
        (what,n,method) for what,n in worth.COSTED for method in worth.METHODS]
    plain = {(r['what'],r['length']): float(r['ms']) for r in rows if r['method']=='softmax'}
    for r in rows:
        ratio = float(r['ms'])/plain[r['what'],r['length']]
        assert float(r['times_softmax'])==pytest.approx(ratio, abs=.01) and ratio>0
    for model,weights in built:                              # timing has taught them nothing
        for now,then in zip(model.parameters(), weights): assert torch.equal(now, then)
    widths = {name: model.mean_width(64) for name,(model,_) in zip(worth.METHODS, built)}
    for name in ('fixed','learned','learned_alpha'): assert widths[name]==pytest.approx(32, abs=1)
    assert 32<=widths['span']<=32+worth.RAMP
