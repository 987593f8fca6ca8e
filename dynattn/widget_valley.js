  // Two heads on one sentence, examples/bank.csv: the share of the weight at distance 0, 1, … 12. A test compares them.
  const SHARES = {
    near: [0.149835727, 0.362097704, 0.254911457, 0.056530407, 0.035781057, 0.029584038, 0.046127436, 0.016753416, 0.009847553, 0.007967351, 0.003871485, 0.013023765, 0.013668602],
    far: [0.161049857, 0.085382394, 0.121517991, 0.093944769, 0.084838088, 0.097569044, 0.054673167, 0.073002398, 0.081114876, 0.082376486, 0.016720554, 0.040663683, 0.007146693]};
  const PRICE = .04, LEVEL = Math.exp(-.5), FARTHEST = 12;
  const WINDOWS = {      // of a distance x, a width s and a steepness p: the mask, and its derivative in s
    box: {value: (x, s) => x < s + 1 ? 1 : 0, slope: () => 0},
    edge: {
      value: (x, s, p) => { const V = CURVES.bell.value(x, s + 1); return V > LEVEL ? MASKS.edge.value(V, LEVEL, p) : 0; },
      slope: (x, s, p) => { const V = CURVES.bell.value(x, s + 1); return V > LEVEL ? MASKS.edge.slope(V, LEVEL, p) * CURVES.bell.slope(x, s + 1) : 0; }},
    bell: CURVES.bell};
  const lossAt = ({head, mask, p}, s) => 1 - SHARES[head].reduce((sum, share, x) => sum + share * WINDOWS[mask].value(x, s, p), 0) + PRICE * s;
  KINDS.valley = {
    title: 'Which way is down?',
    controls: [choice('mask', 'window', {box: 'a box', edge: 'edge, which comes down to its end', bell: 'a bell, which has no end'}),
      choice('head', 'head', {far: 'far head', near: 'near head'}), slider('sigma', 'σ in words', .1, FARTHEST, .05),
      {...slider('p', 'p, the steepness of the edge', -1, 3, .01, true), used: s => s.mask === 'edge'}],
    start: {mask: 'box', head: 'far', sigma: 4.5, p: 2},
    compute(s) {
      const pull = SHARES[s.head].reduce((sum, share, x) => sum + share * WINDOWS[s.mask].slope(x, s.sigma, s.p), 0);
      const widths = Array.from({length: 1191}, (_, i) => .1 + i / 100), losses = widths.map(sigma => lossAt(s, sigma));
      return {loss: lossAt(s, s.sigma), slope: PRICE - pull, pull, best: widths[losses.indexOf(Math.min(...losses))]};
    },
    words: v => [['loss', v.loss], ['slope under the dot', v.slope], ['lowest at σ', v.best]],
    verdict(v, s) {
      if (Math.abs(v.pull) < 1e-4) return ['bad', 'The gradient is the price and nothing else: no word pulls. Training walks to the left, wherever the best width is.'];
      const wrong = (v.best - s.sigma) * v.slope > 0;
      if (Math.abs(v.slope) < .004) return Math.abs(v.best - s.sigma) < .7 ? ['good', 'Level ground at the bottom of the valley. Training ends here.']
        : ['odd', 'Level ground, but not the bottom: a dent. Training can get stuck here.'];
      if (wrong) return ['odd', 'Here it goes down away from the best width: the side of a dent, where a narrow window gets stuck.'];
      return ['good', `Training feels the way: σ becomes ${v.slope < 0 ? 'wider' : 'narrower'}.`];
    },
    draw(svg, width, s, v) {
      const p = panel(svg, [44, 22, width - 14, 210], [0, FARTHEST], [.2, 1.1], ['σ in words', 'weight missed + 0.04 σ'], [0, 2, 4, 6, 8, 10, 12]);
      const along = (from, to) => Array.from({length: 61}, (_, i) => from + (to - from) * i / 60).map(x => [x, lossAt(s, x)]);
      for (let k = 0; k < FARTHEST; k++) p.line(along(Math.max(k, .05), k + 1 - 1e-6), INK);
      p.dot(s.sigma, v.loss, WARM);
      const step = -Math.sign(v.slope) * 1.1, x = p.X(s.sigma), y = p.Y(v.loss), tip = p.X(Math.max(0, Math.min(FARTHEST, s.sigma + step)));
      const tall = p.Y(v.loss + v.slope * step), back = tip > x ? -7 : 7;
      if (Math.abs(v.slope) >= .004 && tip !== x) add(svg, 'path', {d: `M${x} ${y}L${tip} ${tall}m${back} -5L${tip} ${tall}l${back} 5`, fill: 'none', stroke: RED, 'stroke-width': 2.5});
      return 250;
    }};
