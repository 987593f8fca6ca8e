"The widgets in a real browser: they are moved, and their numbers are Python's."
import csv, json, math
import pytest, torch
import freeze
from dynattn import attention
from dynattn.alpha import entmax
from dynattn.curve import bell, crossing, n_within, normal
from dynattn.sigma import sigma_link
from dynattn.smoothing import Edge, Tanh, cut
from dynattn.window import Window
from dynattn.plot import show_boxes
from dynattn.widgets import _WIDGETS, show_widget

pytestmark = pytest.mark.docs

def test_a_widget_is_one_small_page_of_its_own():
    page = show_widget('alpha', alpha=2.)._repr_html_()
    assert len(page)<30_000 and '"alpha": 2.0' in page and 'http' not in page.replace('http://www.w3.org/2000/svg', '')
    with pytest.raises(ValueError, match='kind: expected one of sigma,'): show_widget('sliders')

def test_arrows_go_from_frame_to_frame():
    boxes = {'q': (0, .5), 'k': (0, 0), 'scores': (1.5, .25, 'scores of both')}
    texts = [t.get_text() for t in show_boxes(boxes, [('q', 'scores'), ('k', 'scores')], groups={'projections': ['q', 'k']}).texts]
    assert [t for t in texts if t]==['projections', 'q', 'k', 'scores of both']
    with pytest.raises(ValueError, match="arrows: expected names of boxes, got 'v'"): show_boxes(boxes, [('q', 'v')])
    with pytest.raises(ValueError, match="groups: expected names of boxes, got 'v'"): show_boxes(boxes, groups={'all': ['v']})

@pytest.fixture
def opened(browser, tmp_path):
    "Opens a widget as a file, without a server, and returns the page and its complaints"
    tabs = []
    def show(kind, width=900, html=None, **start):
        f = tmp_path/'widget.html'
        head = '<!doctype html><meta charset=utf-8><meta name=viewport content="width=device-width"><body>'
        f.write_text(head+(html or show_widget(kind, **start)._repr_html_()), encoding='utf-8')
        tab = browser.new_page(viewport=dict(width=width, height=800))
        tab.complaints = []
        tab.on('console', lambda m: m.type in ('error','warning') and tab.complaints.append(m.text))
        tab.on('pageerror', lambda e: tab.complaints.append(str(e)))
        tab.on('request', lambda r: r.url.startswith('file:') or tab.complaints.append(f'asks the network: {r.url}'))
        tab.goto(f.as_uri())
        tabs.append(tab)
        return tab
    yield show
    complaints = [c for t in tabs for c in t.complaints]
    for t in tabs: t.close()
    assert not complaints

def move(tab, **controls):
    "Set controls as a hand would, and return what the widget then computes, and where its controls stand"
    for name,value in controls.items():
        if isinstance(value, str): tab.select_option(f'[name={name}]', value)
        else: tab.evaluate('([n, v]) => { const e = document.querySelector(`[name=${n}]`); e.value = v; e.dispatchEvent(new Event("input")) }', [name, value])
    return json.loads(tab.get_attribute('.dynattn-widget', 'data-values')), {
        n: float(tab.input_value(f'[name={n}]')) for n,v in controls.items() if not isinstance(v, str)}

def near(got, want): torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-9)

@pytest.mark.parametrize('link', ['sigmoid', 'relu', 'softplus'])
def test_sigma(opened, link):
    tab = opened('sigma')
    for z in -3., .05, 2.5:
        got,_ = move(tab, link=link, z=z)
        x = torch.tensor(z, dtype=torch.float64, requires_grad=True)
        sigma = sigma_link(x, link)
        near([got['sigma'], got['slope']], [sigma.item(), torch.autograd.grad(sigma, x)[0].item()])

def mask_of(kind, V, T, p):
    if kind=='power': return 1-cut(V, T, 1.)**p
    return Tanh(p).of(cut(V, T, 0.)) if kind=='tanh' else Edge(p).of(V, T)

@pytest.mark.parametrize('curve,sigma,T', [('normal',.4169,.9), ('normal',.3,.5), ('normal',.55,.9), ('bell',.1,.6), ('bell',.317,.9)])
@pytest.mark.parametrize('mask,log_p', [('power',4.), ('power',2.), ('tanh',0.), ('tanh',4.), ('edge',.3)])
def test_window(opened, curve, sigma, T, mask, log_p):
    "Every number of the widget of chapter 13; the true derivative by autograd and by the speed of the edges"
    got,at = move(opened('window13', sigma=.4), curve=curve, sigma=sigma, T=T, mask=mask, p=log_p)
    s = torch.tensor(at['sigma'], dtype=torch.float64, requires_grad=True)
    x,p = torch.arange(-96., 97, dtype=torch.float64)/64, 10**at['p']
    V = {'normal': normal, 'bell': bell}[curve](x, s)
    near(got['V'], V.detach())
    M = mask_of(mask, V, at['T'], p)
    if not torch.isfinite(M).all(): return             # a density above 1 overflows, in the widget as well
    near(got['M'], M.detach())
    slope = torch.autograd.grad(M.sum(), s, retain_graph=True)[0].item()
    near(got['autograd'], slope)
    half = crossing(s, at['T'], curve)
    speed = torch.autograd.grad(half, s)[0].item()
    near(got['half_width'], half.item()*64)
    assert got['keys']==(V>at['T']).sum().item()
    assert got['keys']==n_within(half*64).item()
    cliff = 0. if mask=='edge' else mask_of(mask, torch.tensor(at['T']+1e-12, dtype=torch.float64), at['T'], p).item()
    near(got['truth'], slope+2*64*speed*cliff)

def test_the_gradient_vanishes_and_comes_back(opened):
    tab = opened('window13')
    words = lambda: tab.inner_text('[role=status]')
    move(tab, p=4.); assert 'vanished' in words()
    move(tab, p=2.); assert 'wrong sign' in words()
    move(tab, mask='edge', curve='bell', p=.3, T=.6); assert 'is the true derivative' in words()

def test_the_widget_of_chapter_13_never_claims_more_than_the_whole(opened):
    "Where autograd says more than the true derivative, its share is a factor and not a percentage"
    tab = opened('window13')
    words = tab.inner_text('[role=status]')
    assert '4.8 times the true derivative' in words and '%' not in words
    assert 'N 128' in tab.inner_text('.dynattn-widget')

@pytest.mark.parametrize('kind', ['window11', 'window13', 'window14'])
def test_the_widest_window_is_counted_whole(opened, kind):
    got,at = move(opened(kind), curve='bell', sigma=.6, T=.05)
    half = crossing(torch.tensor(at['sigma'], dtype=torch.float64), at['T'], 'bell')*64
    near(got['half_width'], half.item())
    assert got['keys']==n_within(half).item()==187

def test_a_control_without_effect_is_off(opened):
    tab = opened('tiles')
    assert tab.is_enabled('[name=b]')
    tab.select_option('[name=how]', 'chunks')
    assert tab.is_disabled('[name=b]')

def shares(head):
    "The share of a head's weight at each distance, from the file of lesson 2"
    with open(freeze.ROOT/'examples/bank.csv', newline='', encoding='utf-8') as f: rows = [row for row in csv.reader(f) if row[0]==head]
    weights = torch.tensor([[float(x) for x in row[2:]] for row in rows], dtype=torch.float64).softmax(-1)
    distance = (torch.arange(13)[:,None]-torch.arange(13)).abs()
    return torch.stack([weights[distance==d].sum()/13 for d in range(13)])

@pytest.mark.parametrize('head', ['near', 'far'])
@pytest.mark.parametrize('mask,log_p', [('box', None), ('edge', -1.), ('edge', .3), ('edge', 2.), ('bell', None)])
def test_valley(opened, head, mask, log_p):
    "Lesson 4: the loss, and the gradient that training feels"
    tab = opened('valley')
    x,T = torch.arange(13, dtype=torch.float64),math.exp(-.5)
    of = dict(box=lambda s: (x < s+1).double()+0*s, edge=lambda s: Edge(10**log_p).of(bell(x, s+1), T), bell=lambda s: bell(x, s))[mask]
    move(tab, mask=mask)
    assert tab.is_enabled('[name=p]')==(mask=='edge')      # the others have no p
    if log_p: log_p = move(tab, p=log_p)[1]['p']
    for sigma in (.35, 2.5, 3.75, 9.6, 11.95):
        got,at = move(tab, mask=mask, head=head, sigma=sigma)
        s = torch.tensor(at['sigma'], dtype=torch.float64, requires_grad=True)
        loss = 1-(shares(head)*of(s)).sum()+.04*s
        near([got['loss'], got['slope']], [loss.item(), torch.autograd.grad(loss, s)[0].item()])

def test_the_gradient_vanishes_on_a_stair_and_comes_back_on_a_slope(opened):
    tab = opened('valley')
    words = lambda: tab.inner_text('[role=status]')
    for sigma in (.5, 4.5, 11.5):
        got,_ = move(tab, mask='box', head='far', sigma=sigma)
        assert abs(got['slope']-.04)<1e-9 and 'the price and nothing else' in words()
    got,_ = move(tab, mask='edge', sigma=4.5); assert got['slope']<0 and 'becomes wider' in words()
    got,_ = move(tab, sigma=11.9); assert got['slope']>0 and 'becomes narrower' in words()
    move(tab, sigma=10.45); assert 'bottom of the valley' in words()
    move(tab, sigma=.8); assert 'dent' in words()

def test_the_gradient_vanishes_by_a_slider(opened):
    "A steep edge is a box: only the price is left. So it is where a bell is too narrow to see a word"
    tab = opened('valley')
    words = lambda: tab.inner_text('[role=status]')
    got,_ = move(tab, mask='edge', sigma=4.5, p=.3); assert got['slope']<0 and 'becomes wider' in words()
    got,_ = move(tab, p=2.); assert abs(got['slope']-.04)<1e-9 and 'the price and nothing else' in words()
    got,_ = move(tab, p=.3); assert got['slope']<0 and 'becomes wider' in words()
    got,_ = move(tab, mask='bell', sigma=.1); assert abs(got['slope']-.04)<1e-9 and 'the price and nothing else' in words()

WIDGETS = 'sigma', 'window11', 'window12', 'window13', 'window14', 'alpha', 'alpha3', 'matrix', 'tiles', 'valley'

@pytest.mark.parametrize('kind', WIDGETS)
def test_every_control_has_a_name_for_a_screen_reader(opened, kind):
    "The name is what stands above the control, whatever its value, and the value is read as it is shown"
    tab = opened(kind)
    controls = tab.locator('.dynattn-widget :is(input, select)')
    for control in controls.all():
        role = 'slider' if control.get_attribute('type')=='range' else 'combobox'
        shown = control.locator('xpath=..').locator('span span').inner_text()
        assert tab.get_by_role(role, name=shown, exact=True).count()==1, (kind, shown)
        if role=='slider': assert control.get_attribute('aria-valuetext')==control.locator('xpath=..').locator('data').inner_text()
    assert controls.count()>0

SMALL = """() => {      // pairs of words that stand upon another, by the height of their letters, and words that leave the drawing
  const svg = document.querySelector('.dynattn-widget svg'), edge = svg.getBoundingClientRect(), bad = [];
  const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim() && !t.hasAttribute('transform')).map(t => {
    const r = t.getBoundingClientRect(); return [t.textContent, r.left, r.right, r.top + .1 * r.height, r.bottom - .1 * r.height]; });
  texts.forEach(([a, l, r, t, b], i) => {
    if (l < edge.left - 1 || r > edge.right + 1) bad.push('leaves: ' + a);
    for (const [c, l2, r2, t2, b2] of texts.slice(i + 1)) if (Math.min(r, r2) > Math.max(l, l2) + 1 && Math.min(b, b2) > Math.max(t, t2)) bad.push(a + ' on ' + c);
  });
  return bad; }"""

@pytest.mark.parametrize('width', [900, 340])
@pytest.mark.parametrize('kind', WIDGETS)
def test_words_in_a_drawing_stand_apart(opened, kind, width): assert opened(kind, width).evaluate(SMALL)==[]

@pytest.mark.parametrize('kind', WIDGETS)
def test_a_label_belongs_to_its_control_and_only_the_verdict_is_announced(opened, kind):
    "A click on the words goes to the slider or the list beneath; a value beside them is no live region of its own"
    tab = opened(kind)
    for label in tab.locator('.dynattn-widget label').all():
        if label.locator('input, select').is_disabled(): continue
        label.locator('span span').click()
        assert label.evaluate('l => document.activeElement === l.querySelector("input, select")')
    assert tab.get_by_role('status').count()==1

@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('kind', WIDGETS)
def test_letters_in_a_drawing_have_the_colour_of_the_page(opened, kind, scheme):
    "Colours that suit a line are too pale for words: the amber on white has a contrast of 3"
    tab = opened(kind)
    tab.emulate_media(color_scheme=scheme)
    assert tab.evaluate('[...document.querySelectorAll(".dynattn-widget svg text")].every(t => getComputedStyle(t).fill === getComputedStyle(document.body).color)')

@pytest.mark.parametrize('kind', WIDGETS)
def test_a_drawing_is_read_out_as_its_title_its_numbers_and_its_verdict(opened, kind):
    "Each apart from the next: `loss 0.48slope under the dot 0.04` is no sentence"
    tab = opened(kind)
    told = tab.get_attribute('.dynattn-widget svg', 'aria-label').split('; ')
    shown = tab.locator('.dynattn-widget span:has(> b)').all_inner_texts()
    assert told==[tab.get_attribute('.dynattn-widget', 'aria-label'), *shown, tab.inner_text('[role=status]')]

def test_true_derivative_is_the_measured_one(opened):
    "On a grid of ten thousand points to a token, moving sigma changes the area as the two parts together say"
    got,at = move(opened('window13'), mask='power', p=2.)
    x = torch.arange(-320_000, 320_001, dtype=torch.float64)/640_000
    area = lambda s: (1-cut(normal(x, s), .9, 1.)**10**at['p']).sum().item()*64/640_000
    measured = (area(.4169+1e-4)-area(.4169-1e-4))/2e-4
    assert abs(measured-got['truth']) < .05*abs(measured) and abs(measured-got['autograd']) > abs(measured)

def test_window_inside_a_softmax(opened):
    got,_ = move(opened('window14'), curve='bell', mask='edge', T=.6, p=.3)
    near(sum(got['weights']), 1.)
    o = torch.arange(-96., 97, dtype=torch.float64)
    scores = torch.sin(1.7*o)+torch.cos(.6*o*o)
    near(got['weights'], torch.softmax(scores+torch.tensor(got['M'], dtype=torch.float64).log(), 0))

@pytest.mark.parametrize('alpha', [1., 1.01, 1.5, 2., 2.7])
def test_alpha(opened, alpha):
    got,at = move(opened('alpha'), alpha=alpha, s3=2.1, s6=-3.)
    scores = torch.tensor([1.2,.9,.3,at['s3'],-.4,-1.1,at['s6']], dtype=torch.float64)
    want = entmax(scores, alpha)
    near(got['weights'], want)
    assert got['support']==(want>0).sum()
    near(got['entropy'], torch.special.entr(want).sum())

@pytest.mark.parametrize('alpha', [1., 1.5, 2.7])
def test_alpha_of_three(opened, alpha):
    "The widget that chapter 21 begins with: three curves, and a dot on each"
    tab = opened('alpha3')
    got,at = move(tab, alpha=alpha, s2=-1.2)
    want = entmax(torch.tensor([1.5,1.,at['s2']], dtype=torch.float64), alpha)
    near(got['weights'], want)
    assert got['support']==(want>0).sum() and tab.locator('circle').count()==3
    assert ('exactly zero' in tab.inner_text('[role=status]'))==(got['support']<3)

@pytest.mark.parametrize('sigma,alpha', [(2.,1.), (6.,1.5), (24.,2.)])
def test_matrix(opened, sigma, alpha):
    "The widget of the home page against the package itself"
    got,_ = move(opened('matrix'), sigma=sigma, alpha=alpha)
    i,j = torch.meshgrid(*[torch.arange(24., dtype=torch.float64)]*2, indexing='ij')
    scores = 2*torch.sin(3.1*i+1.3*j*j)
    q,v = torch.zeros(1, 1, 24, 1, dtype=torch.float64), torch.ones(1, 1, 24, 1, dtype=torch.float64)
    _,w = attention(q, q, v, scores[None,None], window=Window.default(torch.tensor([[sigma]], dtype=torch.float64)), alpha=alpha,
        return_weights=True, impl='dense')
    near(got['weights'], w[0,0])
    near(got['kept'], (w>0).double().mean().item())

def rectangles(how, w, b, n=64):
    "(first query, end, first key, end), as chapter 18 cuts them"
    if how=='tiles': return [(i, min(i+b, n), max(i-w, 0), min(i+b+w, n)) for i in range(0, n, b)]
    return [(i, min(i+2*w, n), i, min(i+2*w, n)) for i in range(0, n-w, w)]

@pytest.mark.parametrize('how,w,b', [('tiles',6,8), ('tiles',1,32), ('tiles',16,5), ('chunks',4,8), ('chunks',7,8), ('chunks',16,1)])
def test_tiles(opened, how, w, b):
    "Pairs are counted one by one, on a square of 64"
    got,_ = move(opened('tiles'), how=how, w=w, b=b)
    i = torch.arange(64)
    band,times = (i[:,None]-i).abs() <= w,torch.zeros(64, 64)
    for first,end,key,last in rectangles(how, w, b): times[first:end,key:last] += 1
    assert (times[band]>=1).all()
    assert got['needed']==band.sum() and got['multiplied']==times.sum() and got['products']==len(rectangles(how, w, b))
    near([got['ratio'], got['share']], [times.sum()/band.sum(), times.sum()/64**2])

def stored(notebook, kind):
    "The widget as it stands in a chapter"
    cells = json.loads((freeze.ROOT/'nbs'/notebook).read_text(encoding='utf-8'))['cells']
    outputs = [o['data']['text/html'] for c in cells for o in c.get('outputs', []) if 'text/html' in o.get('data', {})]
    return next(''.join(html) for html in outputs if f'dynattn-{kind}' in ''.join(html))

@pytest.fixture(scope='module')
def survey_page(): return stored('survey/79_survey.ipynb', 'survey')

@pytest.fixture(scope='module')
def heads_page(): return stored('guide/02_heads.ipynb', 'heads')

@pytest.mark.parametrize('n', [9, 14, 20])
@pytest.mark.parametrize('choice', [dict(sort='row'), dict(sort='name', causal='leaks'), dict(sort='saved', tag='FP'), dict(sort='saved', tag='none')])
def test_survey(opened, survey_page, n, choice):
    "Against the committed table, whose counts were measured at each length; the widget has polynomials"
    got,_ = move(opened('survey', html=survey_page), n=n, **choice)
    with open(freeze.ROOT/'benchmarks/results/survey.csv', newline='') as f: table = list(csv.DictReader(f))
    full = next(int(r[f'flops_{2**n}']) for r in table if r['name']=='Transformer')
    tag,causal = choice.get('tag', 'all'),choice.get('causal', 'all')
    def wanted(r):
        classes = r['tags'].split('+') if r['row'] else ['none']
        return (tag=='all' or tag in classes) and (causal=='all' or causal==r['causal'])
    def saved(r): return math.log10(full/int(r[f'flops_{2**n}'])) if r[f'flops_{2**n}'] else None
    def name(r): return r['name']+(f", {r['form']}" if r['form'] else '')
    rows = {name(r): r for r in table if wanted(r)}
    assert sorted(got['names'])==sorted(rows) and got['verdicts']==[rows[k]['causal'] for k in got['names']]
    for k,x in zip(got['names'], got['saved'], strict=True):
        assert (x is None)==(saved(rows[k]) is None)
        if x is not None: near(x, saved(rows[k]))
    if choice['sort']=='name': assert got['names']==sorted(got['names'])
    if choice['sort']=='saved': assert (there := [x for x in got['saved'] if x is not None])==sorted(there, reverse=True)
    if choice['sort']=='row': assert (place := [int(rows[k]['row'] or 99) for k in got['names']])==sorted(place)

@pytest.mark.parametrize('at,seed,keep', [(0, '0', '0.4'), (2, '0', '0.25'), (2, '2', '0.25'), (4, '0', '0.1')])
def test_heads(opened, heads_page, at, seed, keep):
    "Widths and losses against the committed rows"
    tab = opened('heads', html=heads_page)
    move(tab, at=2, seed=seed)
    got,_ = move(tab, at=at, layer=23, head=0)
    with open(freeze.ROOT/'benchmarks/results/narrow_widths.csv', newline='') as f:
        widths = {(int(r['layer']), int(r['head'])): float(r['width']) for r in csv.DictReader(f) if (r['keep'],r['seed'])==(keep, seed)}
    with open(freeze.ROOT/'benchmarks/results/narrow_quality.csv', newline='') as f: rows = [r for r in csv.DictReader(f) if r['split']=='test']
    def loss(*run): return torch.tensor([float(r['loss']) for r in rows if (r['method'],r['keep'],r['seed'])==run], dtype=torch.float64).mean()
    near(got['rise'], round((loss('learned', keep, seed)-loss('full', '1.0', '0')).item(), 5))
    near(got['widths'], [widths[k] for k in sorted(widths)])
    near([got['width'], got['share']], [widths[23, 0], float(keep)])
    assert tab.is_enabled('[name=seed]')==(keep=='0.25')

def test_a_head_is_chosen_with_the_pointer(opened, heads_page):
    "The page is light, the head under the pointer is the one of the text, and only recorded heads show weights"
    assert len(heads_page)<100_000
    tab = opened('heads', html=heads_page, width=390)
    bar = lambda layer, head: tab.locator('svg rect[fill=transparent]').nth(3*layer+head)
    bar(9, 2).hover()
    assert 'Layer 9, key head 2' in tab.inner_text('[role=status]') and tab.input_value('[name=layer]')=='9'
    assert json.loads(tab.get_attribute('.dynattn-widget', 'data-values'))['weights']
    bar(9, 1).hover()
    assert 'Layer 9, key head 1' in tab.inner_text('[role=status]')
    assert not json.loads(tab.get_attribute('.dynattn-widget', 'data-values'))['weights']

# ---- `dynattn look`

@pytest.fixture(scope='module')
def looked():
    "What two layers of three heads look at in 40 tokens, and the page of it"
    from dynattn.hf.looking import Looks
    g = torch.Generator().manual_seed(0)
    squares = [torch.randn(3, 40, 40, generator=g).mul(3).masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf).softmax(-1) for _ in range(2)]
    distance = [torch.stack([w.diagonal(-d, 1, 2).sum(-1) for d in range(40)], 1) for w in squares]
    tokens = [f' w{i}' for i in range(38)]+['</script><b>', ' end']
    found = Looks(torch.arange(40), tokens, ['a','b'], distance, [w.sum(1) for w in squares], [w[:,:,0] for w in squares], [w[:,-8:] for w in squares])
    return found,squares,found.page('A text')

def values_of(tab):
    tab.wait_for_function("JSON.parse(document.querySelector('.dynattn-widget').dataset.values).weights.length")
    return json.loads(tab.get_attribute('.dynattn-widget', 'data-values'))

def test_look(opened, looked):
    "The page shows the weights of the chosen head and token, to a step of their roots, and what each token receives"
    found,squares,page = looked
    tab = opened('look', html=page)
    values_of(tab)
    for layer,head,token in ((0,0,7), (1,2,3)):
        got,_ = move(tab, layer=layer, head=head, token=token)
        want = squares[layer][head,32+token]
        assert (torch.tensor(got['weights']).sqrt()-want.sqrt()).abs().max()<.51/31
        assert [got['near'],got['far']]==[int(found.within(x)[layer][head]) for x in (.9,.99)]
    best = want.argmax()
    assert f'“w{best}” {100*got["weights"][best]:.0f} %' in tab.inner_text('[role=status]')
    got,_ = move(tab, show='gets')
    received = squares[1][2].sum(0)
    assert (torch.tensor(got['weights']).sqrt()-(received/received.max()).sqrt()).abs().max()<.51/31
    assert not tab.locator('b', has_text='end').count()       # a text cannot end the script

def test_look_is_chosen_with_a_finger(opened, looked):
    tab = opened('look', html=looked[2], width=390)
    values_of(tab)
    tab.locator('svg rect[style*=pointer]').nth(4).click()
    assert 'Layer 1, head 1.' in tab.inner_text('[role=status]')
    tab.locator('svg text', has_text='w33').click()
    assert tab.input_value('[name=token]')=='1' and '“w33” gives most' in tab.inner_text('[role=status]')

def test_the_page_of_a_large_model_is_small():
    from dynattn.hf.looking import Looks
    g = torch.Generator().manual_seed(0)
    w = [torch.rand(16, 300, 300, generator=g).softmax(-1) for _ in range(24)]
    found = Looks(torch.arange(300), [], ['x']*24, [x.sum(1) for x in w], [x.sum(1) for x in w], [x[:,:,0] for x in w], [x[:,-32:] for x in w])
    assert len(found.page().encode())<200_000

@pytest.mark.parametrize('kind', _WIDGETS)
@pytest.mark.parametrize('width', [1280, 390])
def test_keyboard_and_telephone(opened, heads_page, looked, kind, width):
    tab = opened(kind, width=width, html=dict(heads=heads_page, look=looked[2]).get(kind))
    if kind=='look': values_of(tab)
    before = tab.get_attribute('.dynattn-widget', 'data-values')
    tab.evaluate('document.addEventListener("keydown", event => event.preventDefault())')     # JupyterLab keeps arrow keys for its own
    tab.focus('.dynattn-widget input[type=range]')
    for _ in range(12): tab.keyboard.press('ArrowLeft')
    assert tab.get_attribute('.dynattn-widget', 'data-values')!=before
    assert tab.evaluate('document.scrollingElement.scrollWidth <= innerWidth')
    assert tab.evaluate('[...document.querySelectorAll("svg text")].every(t => parseFloat(getComputedStyle(t).fontSize) >= 11)')
