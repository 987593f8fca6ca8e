// The book's widgets, in plain SVG and JavaScript. `show_widget` writes this file into a notebook's output.
// A widget is a list of controls, a function that computes numbers from their values, and one that draws these numbers.
// The numbers also stand in `data-values` of the element, where tests/test_widgets.py compares them with Python's.
function dynattnWidget(root, kind, start) {
  'use strict';
  const INK = '#2a6fdb', WARM = '#c38700', RED = '#cc3030';
  const SVG = 'http://www.w3.org/2000/svg';

  // ---- elements
  function add(parent, tag, attributes = {}, text) {
    const inSvg = tag === 'svg' || parent.namespaceURI === SVG;
    const node = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  }
  function short(x) {
    if (x === 0) return '0';
    if (!Number.isFinite(x)) return String(x).replace('Infinity', '∞').replace('-', '−');
    const size = Math.abs(x), text = size < 1e-3 || size >= 1e6 ? x.toExponential(1) : String(+x.toPrecision(4));
    return text.replace(/-/g, '−');
  }

  // ---- numbers: the functions of chapters 10 to 14 and 21, by the same names
  const sigmoid = z => 1 / (1 + Math.exp(-z));
  const LINKS = {
    sigmoid: {value: sigmoid, slope: z => sigmoid(z) * (1 - sigmoid(z))},
    relu: {value: z => Math.max(z, 0), slope: z => z > 0 ? 1 : 0},
    softplus: {value: z => Math.max(z, 0) + Math.log1p(Math.exp(-Math.abs(z))), slope: sigmoid}};
  const CURVES = {
    normal: {
      value: (x, s) => Math.exp(-.5 * (x / s) ** 2) / (s * Math.sqrt(2 * Math.PI)),
      slope: (x, s) => CURVES.normal.value(x, s) * ((x / s) ** 2 - 1) / s,
      crossing: (s, T) => { const c = 1 / (T * Math.sqrt(2 * Math.PI)); return s < c ? s * Math.sqrt(2 * Math.log(c / s)) : 0; },
      speed: (s, T) => { const root = Math.sqrt(2 * Math.log(1 / (T * s * Math.sqrt(2 * Math.PI)))); return root > 0 ? root - 1 / root : 0; }},
    bell: {
      value: (x, s) => Math.exp(-.5 * (x / s) ** 2),
      slope: (x, s) => CURVES.bell.value(x, s) * (x / s) ** 2 / s,
      crossing: (s, T) => s * Math.sqrt(-2 * Math.log(T)),
      speed: (s, T) => Math.sqrt(-2 * Math.log(T))}};
  const MASKS = {      // of a curve's value V above the threshold T; each is 0 elsewhere
    power: {value: (V, T, p) => 1 - V ** p, slope: (V, T, p) => -p * V ** (p - 1)},
    tanh: {value: (V, T, p) => Math.tanh(p * V), slope: (V, T, p) => p * (1 - Math.tanh(p * V) ** 2)},
    edge: {value: (V, T, p) => Math.tanh(p * (V - T) / (1 - T)) / Math.tanh(p),
      slope: (V, T, p) => p * (1 - Math.tanh(p * (V - T) / (1 - T)) ** 2) / ((1 - T) * Math.tanh(p))}};
  function entmax(scores, alpha) {
    const top = Math.max(...scores);
    if (top === -Infinity) return scores.map(() => 0);
    const z = scores.map(s => s - top), e = alpha - 1;
    if (e < 1e-9) { const w = z.map(Math.exp), sum = w.reduce((a, b) => a + b); return w.map(v => v / sum); }
    const weights = c => z.map(v => Math.max(0, 1 + e * (v - c)) ** (1 / e));
    let low = 0, high = 1 / e;      // the sum of the weights falls from at least 1 to 0 between them
    for (let i = 0; i < 200 && low < high; i++) {
      const c = (low + high) / 2;
      if (c === low || c === high) break;
      if (weights(c).reduce((a, b) => a + b) > 1) low = c; else high = c;
    }
    const w = weights(low), sum = w.reduce((a, b) => a + b);
    return w.map(v => v / sum);
  }
  // N = 128, so the unit of σ is 64 tokens; REACH holds the widest window that the controls allow
  const HALF = 64, REACH = 96, OFFSETS = Array.from({length: 2 * REACH + 1}, (_, i) => i - REACH);

  // ---- drawing
  function panel(svg, box, domain, range, names, ticks) {
    const [x0, y0, x1, y1] = box, X = x => x0 + (x - domain[0]) / (domain[1] - domain[0]) * (x1 - x0);
    const Y = y => y1 - (Math.max(range[0], Math.min(range[1], y)) - range[0]) / (range[1] - range[0]) * (y1 - y0);
    add(svg, 'path', {d: `M${x0} ${y0}V${y1}H${x1}`, fill: 'none', stroke: 'currentColor', 'stroke-opacity': .6});
    const label = (x, y, text, anchor) => add(svg, 'text', {x, y, 'text-anchor': anchor, 'font-size': 12, fill: 'currentColor'}, text);
    for (const y of range) label(x0 - 5, Y(y) + 4, short(y), 'end');
    for (const x of ticks || [domain[0], (domain[0] + domain[1]) / 2, domain[1]]) label(X(x), y1 + 16, short(x), 'middle');
    label((x0 + x1) / 2, y1 + 31, names[0], 'middle'); label(x0 + 6, y0 - 6, names[1], 'start');
    return {X, Y, line: (points, color, dash = '') => add(svg, 'path', {fill: 'none', stroke: color, 'stroke-width': 2, 'stroke-dasharray': dash,
        d: points.map(([x, y], i) => `${i ? 'L' : 'M'}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join('')}),
      bar: (x, y, color, width) => add(svg, 'rect', {x: X(x) - width / 2, width, fill: color, y: Math.min(Y(0), Y(y)), height: Math.abs(Y(y) - Y(0))}),
      dot: (x, y, color) => add(svg, 'circle', {cx: X(x), cy: Y(y), r: 5, fill: color}),
      text: (x, y, text, anchor = 'start') => label(X(x), Y(y), text, anchor)};
  }

  // ---- the widgets
  const choice = (name, label, values) => ({name, label, values});
  const slider = (name, label, min, max, step, log) => ({name, label, min, max, step, log});
  const KINDS = {};

  KINDS.sigma = {
    title: 'From z to a width',
    controls: [choice('link', 'link', {sigmoid: 'sigmoid', relu: 'ReLU', softplus: 'softplus'}), slider('z', 'z', -6, 6, .05)],
    start: {link: 'sigmoid', z: 0},
    compute: ({link, z}) => ({sigma: LINKS[link].value(z), slope: LINKS[link].slope(z)}),
    words: v => [['σ', v.sigma], ['dσ/dz', v.slope]],
    verdict: v => v.slope === 0 ? ['bad', 'The slope is exactly zero: nothing that comes back can move z.']
      : v.slope < .02 ? ['odd', 'The slope is small: z moves, slowly.'] : ['good', 'A gradient passes through.'],
    draw(svg, width, s, v) {
      const middle = width < 520 ? width : width / 2, tall = width < 520 ? 180 : 0;
      const zs = Array.from({length: 241}, (_, i) => i / 20 - 6), link = LINKS[s.link];
      const left = panel(svg, [40, 22, middle - 16, 150], [-6, 6], [0, 6], ['z', 'σ']);
      left.line(zs.map(z => [z, link.value(z)]), INK); left.dot(s.z, v.sigma, WARM);
      const right = panel(svg, [(tall ? 0 : middle) + 40, 22 + tall, width - 16, 150 + tall], [-6, 6], [0, 1], ['z', 'dσ/dz']);
      right.line(zs.map(z => [z, link.slope(z)]), INK); right.dot(s.z, v.slope, WARM);
      return 190 + tall;
    }};

  function window_(stage) {
    const controls = [choice('curve', 'curve', {normal: 'density (reports)', bell: 'bell (this book)'}),
      slider('sigma', 'σ, as a share of N/2', .02, .6, .0005), slider('T', 'threshold T', .05, .95, .005)];
    if (stage >= 12) controls.push(choice('mask', 'mask', {power: '1 − V^p (March 2022)', tanh: 'tanh(pV) (April 2022)', edge: 'falls to zero (this book)'}),
      slider('p', 'p', -1, 4, .01, true));
    return {
      title: stage === 11 ? 'A curve and a threshold make a window' : stage === 12 ? 'From the curve to a mask' :
        stage === 13 ? 'Make the gradient vanish, and bring it back' : 'A window inside the softmax',
      controls, start: {curve: 'normal', sigma: .4169, T: .9, mask: 'power', p: 2},
      compute({curve, sigma, T, mask, p}) {
        const c = CURVES[curve], m = MASKS[mask], x = OFFSETS.map(o => o / HALF), V = x.map(v => c.value(v, sigma));
        const M = V.map(v => v > T ? m.value(v, T, p) : 0), half = c.crossing(sigma, T);
        const slopes = V.map((v, i) => v > T ? m.slope(v, T, p) * c.slope(x[i], sigma) : 0);
        const autograd = slopes.reduce((a, b) => a + b), cliff = mask === 'edge' ? 0 : m.value(T, T, p);
        const edges = half > 0 ? 2 * HALF * c.speed(sigma, T) * cliff : 0;
        const values = {V, keys: V.filter(v => v > T).length, half_width: half * HALF, peak: c.value(0, sigma)};
        if (stage >= 12) Object.assign(values, {M, centre: M[REACH], cliff});
        if (stage === 13) Object.assign(values, {slopes, autograd, edges, truth: autograd + edges});
        if (stage === 14) {
          const scores = OFFSETS.map(o => Math.sin(1.7 * o) + Math.cos(.6 * o * o)), e = scores.map((s, i) => Math.exp(s) * M[i]);
          const sum = e.reduce((a, b) => a + b);
          values.weights = e.map(v => sum > 0 ? v / sum : 0);
        }
        return values;
      },
      words: v => [['N', 2 * HALF], ['keys above T', v.keys], ['edge in tokens', v.half_width],
        ...(stage === 11 ? [['curve at its centre', v.peak]] : stage === 12 ? [['M at the centre', v.centre], ['height of the cliff', v.cliff]] :
          stage === 13 ? [['autograd', v.autograd], ['the edges', v.edges], ['true derivative', v.truth]] : [['largest weight', Math.max(...v.weights)]])],
      verdict(v, s) {
        if (v.keys === 0) return ['bad', 'Nothing is above T. The window is empty, and its gradient is zero.'];
        if (s.curve === 'normal' && v.peak > 1 && stage > 11 && s.mask === 'power') return ['bad', 'The density is above 1: 1 − V^p is negative, and overflows for large p.'];
        if (stage === 11) return s.curve === 'normal' && CURVES.normal.speed(s.sigma, s.T) < 0 ? ['odd', 'A larger σ makes this window narrower.'] : ['good', 'A larger σ makes this window wider.'];
        if (stage === 12) return v.cliff > 1e-12 ? ['odd', `At the edge the mask falls from ${short(v.cliff)} to 0 in one step.`] : ['good', 'The mask comes down to zero before it ends.'];
        if (stage === 14) return v.cliff > 1e-12 ? ['odd', 'The weights sum to one, and the edge is a cliff.'] : ['good', 'The weights sum to one, and the edge is a slope.'];
        if (Math.abs(v.autograd) < 1e-38) return ['bad', 'The gradient has vanished: float32 holds nothing this small, and the window cannot move.'];
        if (v.autograd * v.truth < 0) return ['bad', 'Autograd has the wrong sign: training moves the window the wrong way.'];
        if (v.edges * v.truth < 0) return ['odd', `Autograd reports ${short(+(v.autograd / v.truth).toPrecision(2))} times the true derivative: it misses the edges, which take most of it back.`];
        if (Math.abs(v.edges) > 1e-9 * Math.abs(v.truth)) return ['odd', `Autograd sees ${short(+(100 * v.autograd / v.truth).toPrecision(2))} % of the true derivative. The edges make the rest.`];
        return ['good', 'Autograd is the true derivative: nothing is hidden in the edges.'];
      },
      draw(svg, width, s, v) {
        const far = [32, 64, REACH].find(r => r >= REACH || v.half_width < r - 4), seen = OFFSETS.map((o, i) => [o, i]).filter(([o]) => Math.abs(o) <= far);
        const w = Math.max(1, (width - 60) / seen.length - 1), names = ['offset of the key, in tokens', stage > 11 ? 'V (line) and M (bars)' : 'V, bars above T'];
        const top = Math.max(1.05, ...v.V.filter(Number.isFinite)), upper = panel(svg, [44, 22, width - 12, 150], [-far, far], [0, top > 1.05 ? Math.min(top, 4) : 1.05], names);
        seen.forEach(([o, i]) => { const y = stage > 11 ? v.M[i] : v.V[i] > s.T ? v.V[i] : 0; if (y) upper.bar(o, y, INK, w).setAttribute('opacity', .75); });
        upper.line(seen.map(([o, i]) => [o, v.V[i]]), WARM);
        upper.line([[-far, s.T], [far, s.T]], 'currentColor', '4 4'); upper.text(far, s.T + .04, 'T', 'end');
        if (stage < 13) return 188;
        if (stage === 14) {
          const most = Math.max(...v.weights, .01), lower = panel(svg, [44, 218, width - 12, 320], [-far, far], [0, +most.toPrecision(2)], [names[0], 'weight, softmax(s + log M)']);
          seen.forEach(([o, i]) => v.weights[i] && lower.bar(o, v.weights[i], INK, w));
          return 360;
        }
        const most = +Math.max(...v.slopes.map(Math.abs).filter(Number.isFinite), 1e-3).toPrecision(2);
        const lower = panel(svg, [44, 218, width - 12, 320], [-far, far], [-most, most], [names[0], 'dM/dσ: autograd (bars), edges (arrows)']);
        lower.line([[-far, 0], [far, 0]], 'currentColor');
        seen.forEach(([o, i]) => v.slopes[i] && lower.bar(o, v.slopes[i], INK, w));
        const outward = Math.sign(v.edges);
        if (outward && v.half_width < far - 4) for (const side of [-1, 1]) {
          const x = lower.X(side * v.half_width), tip = x + side * outward * 26, y = lower.Y(most / 2);
          add(svg, 'path', {d: `M${x} ${y - 12}V${y + 12}M${x} ${y}H${tip}m${-side * outward * 7} -5L${tip} ${y}l${-side * outward * 7} 5`, fill: 'none', stroke: RED, 'stroke-width': 2.5});
        }
        return 360;
      }};
  }
  for (const stage of [11, 12, 13, 14]) KINDS['window' + stage] = window_(stage);

  function alpha_(count, first, draw) {
    const names = Array.from({length: count}, (_, i) => 's' + i);
    return {
      title: count === 3 ? 'Three scores, and how much each is ignored' : 'α over a row of scores',
      controls: [slider('alpha', 'α', 1, 3, .01), ...names.map((name, i) => slider(name, 'score ' + (i + 1), -3, 3, .05))],
      start: {alpha: 1.5, ...Object.fromEntries(names.map((name, i) => [name, first[i]]))},
      compute(s) {
        const weights = entmax(names.map(name => s[name]), s.alpha);
        return {weights, support: weights.filter(w => w > 0).length, entropy: -weights.reduce((a, w) => a + (w > 0 ? w * Math.log(w) : 0), 0)};
      },
      words: v => [['keys with weight', v.support], ['entropy in nats', v.entropy], ['largest weight', Math.max(...v.weights)]],
      verdict: (v, s) => v.support === count ? ['odd', s.alpha === 1 ? 'α = 1 is softmax: every key has some weight.' : 'Every key still has some weight.']
        : ['good', `${count - v.support} of ${count} keys ${count - v.support > 1 ? 'have' : 'has'} a weight of exactly zero.`],
      draw
    };
  }
  KINDS.alpha = alpha_(7, [1.2, .9, .3, 0, -.4, -1.1, -2], (svg, width, s, v) => {
    const p = panel(svg, [40, 22, width - 12, 150], [.5, 7.5], [0, 1], ['key', 'weight'], v.weights.map((_, i) => i + 1)), w = (width - 60) / 10;
    v.weights.forEach((y, i) => { p.bar(i + 1, y, INK, w); p.text(i + 1, Math.min(.93, y) + .04, y ? y.toFixed(3) : '0', 'middle'); });
    return 190;
  });
  KINDS.alpha3 = alpha_(3, [1.5, 1, -.5], (svg, width, s, v) => {       // the three weights against α
    const p = panel(svg, [40, 22, width - 86, 170], [1, 3], [0, 1], ['α', 'weight']);
    const along = Array.from({length: 101}, (_, i) => 1 + i / 50), rows = along.map(a => entmax([s.s0, s.s1, s.s2], a));
    p.line([[s.alpha, 0], [s.alpha, 1]], 'currentColor', '4 4');
    [INK, WARM, RED].forEach((color, i) => {
      const dash = ['', '7 3', '2 3'][i], y = 40 + 18 * i;
      p.line(along.map((a, k) => [a, rows[k][i]]), color, dash); p.dot(s.alpha, v.weights[i], color);
      add(svg, 'path', {d: `M${width - 74} ${y - 4}h22`, stroke: color, 'stroke-width': 2, 'stroke-dasharray': dash});
      add(svg, 'text', {x: width - 46, y, 'font-size': 12, fill: 'currentColor'}, 'score ' + (i + 1));
    });
    return 210;
  });

  const SIZE = 24;
  KINDS.matrix = {
    title: 'One head: how far it looks, and how much it ignores',
    controls: [slider('sigma', 'σ in tokens', 1, 24, .25), slider('alpha', 'α', 1, 2, .01)],
    start: {sigma: 6, alpha: 1.5},
    compute({sigma, alpha}) {
      const T = Math.exp(-.5), weights = [];
      for (let i = 0; i < SIZE; i++) weights.push(entmax(Array.from({length: SIZE}, (_, j) => {
        const V = CURVES.bell.value(j - i, sigma + 1);      // as Window.default: one token behind σ the mask is 0
        return V > T ? 2 * Math.sin(3.1 * i + 1.3 * j * j) + Math.log(MASKS.edge.value(V, T, 2)) : -Infinity;
      }), alpha));
      const flat = weights.flat(), inside = Array.from({length: SIZE * SIZE}, (_, n) => Math.abs(n % SIZE - Math.floor(n / SIZE)) < sigma + 1);
      return {weights, multiplied: inside.filter(Boolean).length / SIZE ** 2, kept: flat.filter(w => w > 0).length / SIZE ** 2};
    },
    words: v => [['pairs multiplied', (100 * v.multiplied).toFixed(0) + ' %'], ['pairs with weight', (100 * v.kept).toFixed(0) + ' %']],
    verdict: () => ['good', 'Both are learned by gradient, for each head. Outside the window nothing is computed.'],
    draw(svg, width, s, v) {
      const side = Math.min(width - 60, 340), cell = side / SIZE, left = (width - side) / 2;
      v.weights.forEach((row, i) => row.forEach((w, j) => w > 0 && add(svg, 'rect', {x: left + j * cell, y: 8 + i * cell, width: cell, height: cell,
        fill: INK, 'fill-opacity': Math.min(1, .1 + 1.6 * w)})));
      add(svg, 'rect', {x: left, y: 8, width: side, height: side, fill: 'none', stroke: 'currentColor', 'stroke-opacity': .6});
      add(svg, 'text', {x: left + side / 2, y: side + 26, 'text-anchor': 'middle', 'font-size': 12, fill: 'currentColor'}, 'key');
      add(svg, 'text', {x: left - 8, y: side / 2, 'text-anchor': 'middle', 'font-size': 12, fill: 'currentColor', transform: `rotate(-90 ${left - 8} ${side / 2})`}, 'query');
      return side + 34;
    }};

  const SPAN = 64;
  function rectangles({how, w, b}) {     // [first query, end, first key, end] of each product
    const out = [];
    if (how === 'tiles') for (let i = 0; i < SPAN; i += b) out.push([i, Math.min(i + b, SPAN), Math.max(i - w, 0), Math.min(i + b + w, SPAN)]);
    else for (let i = 0; i < SPAN - w; i += w) out.push([i, Math.min(i + 2 * w, SPAN), i, Math.min(i + 2 * w, SPAN)]);
    return out;
  }
  const area = s => rectangles(s).reduce((sum, [i, iEnd, j, jEnd]) => sum + (iEnd - i) * (jEnd - j), 0);
  const bandPairs = w => SPAN * (2 * w + 1) - w * (w + 1);
  KINDS.tiles = {
    title: 'Rectangles that cover a band of 64 tokens',
    controls: [choice('how', 'rectangles', {tiles: 'tiles of b queries', chunks: 'sliding chunks of 2w'}),
      slider('w', 'half-width w', 1, 16, 1), {...slider('b', 'queries b of a tile', 1, 32, 1), used: s => s.how === 'tiles'}],
    start: {how: 'tiles', w: 6, b: 8},
    compute(s) {
      const needed = bandPairs(s.w), multiplied = area(s);
      return {needed, multiplied, products: rectangles(s).length, ratio: multiplied / needed, share: multiplied / SPAN ** 2};
    },
    words: v => [['pairs in the band', v.needed], ['pairs multiplied', v.multiplied], ['times the band', v.ratio], ['matrix products', v.products]],
    verdict: v => v.share >= 1 ? ['bad', 'These rectangles multiply as many pairs as plain attention.']
      : v.ratio > 1.6 ? ['odd', `${short(100 * (1 - 1 / v.ratio))} % of the products lie outside the band or are done twice.`]
        : ['good', `${short(100 * v.share)} % of the pairs of plain attention are multiplied.`],
    draw(svg, width, s, v) {
      const wide = width >= 520, side = Math.min(wide ? width / 2 - 40 : width - 60, 300), cell = side / SPAN, left = 34;
      const label = (x, y, text, anchor = 'middle') => add(svg, 'text', {x, y, 'text-anchor': anchor, 'font-size': 12, fill: 'currentColor'}, text);
      const box = ([i, iEnd, j, jEnd], look) => add(svg, 'rect', {x: left + j * cell, y: 8 + i * cell, width: (jEnd - j) * cell, height: (iEnd - i) * cell, ...look});
      for (let i = 0; i < SPAN; i++) box([i, i + 1, Math.max(i - s.w, 0), Math.min(i + s.w + 1, SPAN)], {fill: WARM, 'fill-opacity': .55});
      for (const r of rectangles(s)) box(r, {fill: INK, 'fill-opacity': .22, stroke: INK, 'stroke-opacity': .8});
      box([0, SPAN, 0, SPAN], {fill: 'none', stroke: 'currentColor', 'stroke-opacity': .6});
      label(left + side / 2, side + 25, 'key'); label(left - 6, side / 2, 'query', 'end').setAttribute('transform', `rotate(-90 ${left - 6} ${side / 2})`);
      const top = wide ? 0 : side + 40, low = [wide ? left + side + 52 : 44, 22 + top], bs = Array.from({length: 32}, (_, i) => i + 1);
      const ratios = bs.map(b => [b, area({how: 'tiles', w: s.w, b}) / v.needed]);
      const most = Math.max(2.5, Math.ceil(Math.max(...ratios.map(r => r[1]), v.ratio)));
      const plot = panel(svg, [...low, width - 12, low[1] + 190], [0, 32], [1, most], ['queries b of a tile', 'pairs multiplied, times the band']);
      plot.line(ratios, INK);
      if (s.how === 'tiles') plot.dot(s.b, v.ratio, WARM); else { plot.line([[0, v.ratio], [32, v.ratio]], WARM, '5 4'); plot.text(32, v.ratio + .06, 'sliding chunks', 'end'); }
      return Math.max(wide ? side + 34 : 0, low[1] + 230);
    }};

  const TONES = {yes: '#2e9d5b', leaks: RED, no: '#808080'};
  KINDS.survey = {      // `rows`: name, classes, verdict, and FLOPs: three coefficients, or counts at 2^9 to 2^20 tokens
    title: 'The survey, sorted and filtered',
    controls: [choice('sort', 'sort by', {row: "the survey's order", name: 'name', saved: 'FLOPs at this length'}),
      choice('tag', 'class', {all: 'all', FP: 'fixed patterns', M: 'memory', LP: 'learned patterns', LR: 'low rank', KR: 'kernels',
        RC: 'recurrence', DS: 'downsampling', Sparse: 'sparse', none: 'beside the survey’s table'}),
      choice('causal', 'can it decode? (measured)', {all: 'any verdict', yes: 'yes', leaks: 'leaks', no: 'no'}), slider('n', 'tokens, as a power of 2', 9, 20, 1)],
    start: {sort: 'row', tag: 'all', causal: 'all', n: 12, rows: []},
    compute({sort, tag, causal, n, rows}) {
      const N = 2 ** n, full = 64 * N * N + 2048 * N;
      const systems = rows.map(([name, tags, verdict, flops, place]) => {
        const count = flops.length === 3 ? flops[2] * N * N + flops[1] * N + flops[0] : flops[n - 9];
        return {name, tags: tags.split('+'), verdict, place, saved: count ? Math.log10(full / count) : null};
      }).filter(r => (tag === 'all' || (tag === 'none' ? !r.place : r.place && r.tags.includes(tag))) && (causal === 'all' || r.verdict === causal));
      if (sort === 'name') systems.sort((a, b) => a.name < b.name ? -1 : a.name > b.name ? 1 : 0);
      if (sort === 'saved') systems.sort((a, b) => (b.saved ?? -99) - (a.saved ?? -99));
      return {N, names: systems.map(r => r.name), saved: systems.map(r => r.saved), verdicts: systems.map(r => r.verdict)};
    },
    words: v => [['forms shown', v.names.length], ['cheaper than exact attention', v.saved.filter(x => x > 1e-9).length], ['that leak', v.verdicts.filter(x => x === 'leaks').length]],
    verdict: v => v.names.length ? ['good', `Bars: how many times fewer FLOPs than exact attention at ${v.N} tokens. Green dots can decode, red squares leak, grey rings cannot decode.`] : ['odd', 'No system fits this choice.'],
    draw(svg, width, s, v) {
      const label = Math.min(235, width * .52), x0 = label + 26, unit = (width - x0 - 58) / 5, fits = Math.floor(label / 6.3);
      const text = (x, y, words, anchor) => add(svg, 'text', {x, y, 'text-anchor': anchor, 'font-size': 12, fill: 'currentColor'}, words);
      v.names.forEach((name, i) => {
        const y = 18 * i + 14, saved = v.saved[i];
        const color = TONES[v.verdicts[i]], look = v.verdicts[i] === 'no' ? {fill: 'none', stroke: color, 'stroke-width': 2} : {fill: color};
        if (v.verdicts[i] === 'leaks') add(svg, 'rect', {x: 3, y: y - 8, width: 8, height: 8, ...look}); else add(svg, 'circle', {cx: 7, cy: y - 4, r: 4, ...look});
        text(18, y, name.length > fits ? name.slice(0, fits - 1) + '…' : name, 'start');
        if (saved === null) return text(x0 + 4, y, 'not at this length', 'start');
        const end = x0 + Math.max(-1, saved) * unit;
        add(svg, 'rect', {x: Math.min(x0, end), y: y - 11, width: Math.max(1, Math.abs(end - x0)), height: 13, fill: saved < 0 ? WARM : INK});
        text(Math.max(end, x0) + 5, y, short(+(10 ** saved).toPrecision(2)) + '×', 'start');
      });
      return Math.max(20, 18 * v.names.length + 8);
    }};

  // KIND: the widget of a file of its own comes here

  // ---- one widget on the page
  const widget = KINDS[kind], state = {...widget.start, ...start}, inputs = {};
  root.textContent = '';
  root.setAttribute('role', 'group');
  root.setAttribute('aria-label', widget.title);
  root.style.cssText = 'border:1px solid rgba(127,127,127,.4);border-radius:8px;padding:12px 14px;margin:14px 0;max-width:760px;box-sizing:border-box;font:14px/1.45 system-ui,sans-serif';
  add(root, 'div', {style: 'font-weight:600;margin-bottom:8px'}, widget.title);
  const form = add(root, 'div', {style: 'display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:6px 22px'});
  for (const c of widget.controls) {
    const label = add(form, 'label', {style: 'display:block'}), head = add(label, 'span', {style: 'display:flex;justify-content:space-between'});
    add(head, 'span', {}, c.label);
    const shown = add(head, 'data', {style: 'font-variant-numeric:tabular-nums'});      // an <output> would take the label from the control, and be announced
    const input = c.values ? add(label, 'select', {name: c.name, style: 'width:100%;font:inherit;padding:3px;color:inherit;background:transparent;border:1px solid rgba(127,127,127,.6);border-radius:4px'})
      : add(label, 'input', {type: 'range', name: c.name, min: c.min, max: c.max, step: c.step, style: `width:100%;margin:2px 0;accent-color:${INK}`});
    for (const [value, text] of Object.entries(c.values || {})) add(input, 'option', {value, style: 'color:#111;background:#fff'}, text);
    input.value = c.log ? Math.log10(state[c.name]) : state[c.name];
    input.addEventListener('input', () => { state[c.name] = c.values ? input.value : c.log ? 10 ** +input.value : +input.value; update(); });
    input.addEventListener('keydown', event => event.stopPropagation());     // JupyterLab takes arrow keys for its own
    input.setAttribute('aria-label', c.label);      // the label above holds the value as well, which is no name
    inputs[c.name] = {c, shown, input};
  }
  const svg = add(root, 'svg', {role: 'img', style: 'display:block;width:100%;margin-top:10px;overflow:visible', 'aria-label': widget.title});
  const words = add(root, 'div', {style: 'display:flex;flex-wrap:wrap;gap:2px 22px;font-variant-numeric:tabular-nums;margin-top:6px'});
  const verdict = add(root, 'div', {role: 'status', style: 'margin-top:6px;padding-left:9px;border-left:4px solid'});
  function choose(values) {      // with the drawing itself
    if (Object.entries(values).every(([name, value]) => state[name] === value)) return;
    Object.assign(state, values);
    for (const name of Object.keys(values)) inputs[name].input.value = state[name];
    update();
  }
  function update() {
    for (const {c, shown, input} of Object.values(inputs)) {
      shown.textContent = c.values ? '' : (c.says || short)(state[c.name], state);
      if (!c.values) input.setAttribute('aria-valuetext', shown.textContent);
      input.disabled = Boolean(c.used) && !c.used(state);
    }
    const v = widget.compute(state), width = Math.max(260, root.clientWidth - 28);
    root.dataset.values = JSON.stringify(v);
    svg.textContent = '';
    const height = widget.draw(svg, width, state, v);
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    words.textContent = '';
    for (const [name, value] of widget.words(v, state)) {
      const item = add(words, 'span');
      add(item, 'span', {}, name + ' '); add(item, 'b', {}, typeof value === 'number' ? short(value) : value);
    }
    const [tone, text] = widget.verdict(v, state);
    verdict.textContent = text;
    verdict.style.borderLeftColor = {good: '#2e9d5b', odd: WARM, bad: RED}[tone];
    svg.setAttribute('aria-label', [widget.title, ...[...words.children].map(item => item.textContent), text].join('; '));
  }
  update();
  let drawnAt = root.clientWidth;
  new ResizeObserver(() => { if (root.clientWidth !== drawnAt) { drawnAt = root.clientWidth; update(); } }).observe(root);
}
