  // What heads look at: the explorer of a model's, and the page of any model. `show_widget` puts both into widgets.js where one is shown
  function shadeText(svg, width, y, tokens, shade, under, pick) {      // -> height; `pick(i)`: what a click on a token does, if anything
    let x = 0;
    tokens.forEach((token, i) => {
      const shown = (i ? token : token.trimStart()).replace(/\s*\n\s*/g, ' ↵ ') || '·', size = Math.min(width, 7.3 * [...shown].length);
      if (x && x + size > width) { x = 0; y += 22; }
      if (shade(i)) add(svg, 'rect', {x, y: y - 13, width: size, height: 18, fill: WARM, 'fill-opacity': shade(i)});
      if (under(i)) add(svg, 'path', {d: `M${x} ${y + 4}h${size}`, stroke: WARM, 'stroke-width': 2});
      const word = add(svg, 'text', {x, y, 'font-size': 12, fill: 'currentColor', 'font-family': 'ui-monospace,monospace', 'xml:space': 'preserve', style: 'white-space:pre', textLength: size, lengthAdjust: 'spacingAndGlyphs'}, shown);
      if (pick && pick(i)) { word.style.cursor = 'pointer'; word.addEventListener('pointerdown', pick(i)); }
      x += size;
    });
    return y + 12;
  }
  const KEPT = 2048;
  // `runs`: share, seed, rise of the loss, widths; `texts`: layer, head, weights of the tokens; `tokens`: a text's end; `costs`: of each head, at the widths `sizes`
  KINDS.heads = {
    title: 'What 90 heads of a language model need',
    controls: [{...slider('at', 'keys kept, of 2,048 tokens', 0, 4, 1), says: (at, s) => (100 * shares(s)[at]).toFixed(0) + ' %'},
      {...choice('seed', 'run (three at 25 %)', {0: 'first', 1: 'second', 2: 'third'}), used: s => seeds(s) > 1},
      slider('layer', 'layer', 0, 29, 1), slider('head', 'key head', 0, 2, 1)],
    start: {at: 2, seed: '0', layer: 19, head: 2, runs: [], texts: [], tokens: [], sizes: [], costs: []},
    compute(s) {
      const {share, rise, widths} = ofRun(s), width = widths[3 * s.layer + s.head], sorted = [...widths].sort((a, b) => a - b);
      const known = s.texts.find(([layer, head]) => layer === s.layer && head === s.head);
      return {share, rise, width, median: (sorted[44] + sorted[45]) / 2, widths, weights: known ? known[2] : null};
    },
    words: v => [['this head sees', v.width + ' tokens back'], ['the median head', short(v.median)], ['the loss rises by', v.rise.toFixed(3)]],
    verdict: (v, s) => v.weights ? ['good', `Layer ${s.layer}, key head ${s.head}. The darker a token, the more weight the last one gives it in the full model. Underlined: what the window reaches.`]
      : ['odd', `Layer ${s.layer}, key head ${s.head}. Underlined: what the window reaches, seen from the last token. The heads with a dot also show their weights.`],
    draw(svg, width, s, v) {
      const x0 = 26, wide = (width - x0) / 3, text = (x, y, words, anchor, more = {}) =>
        add(svg, 'text', {x, y, 'text-anchor': anchor, 'font-size': 12, fill: 'currentColor', ...more}, words);
      for (const h of [0, 1, 2]) text(x0 + h * wide, 12, `key head ${h}`, 'start');
      v.widths.forEach((w, i) => {
        const layer = Math.floor(i / 3), head = i % 3, x = x0 + head * wide, y = 20 + 12 * layer, here = layer === s.layer && head === s.head;
        if (!head && layer % 5 === 0) text(x0 - 6, y + 10, String(layer), 'end');
        add(svg, 'rect', {x, y, width: wide - 12, height: 10, fill: here ? WARM : 'currentColor', 'fill-opacity': here ? .35 : .08});
        add(svg, 'rect', {x, y, width: Math.max(2, Math.min(1, w / KEPT) * (wide - 12)), height: 10, fill: here ? WARM : INK});
        if (s.texts.some(t => t[0] === layer && t[1] === head)) add(svg, 'circle', {cx: x + wide - 7, cy: y + 5, r: 2.5, fill: 'currentColor'});
        const hit = add(svg, 'rect', {x, y: y - 1, width: wide, height: 12, fill: 'transparent', style: 'cursor:pointer'});
        for (const event of ['pointerenter', 'pointerdown']) hit.addEventListener(event, () => choose({layer, head}));
      });
      const tall = s.costs.length ? costCurves(svg, width, 392, s, v.width, text) : 0;
      const most = Math.max(...(v.weights || [1])), end = s.tokens.length - 1;
      return shadeText(svg, width, 410 + tall, s.tokens, i => v.weights ? .75 * v.weights[i] / most : 0, i => end - i <= v.width);
    }};
  function costCurves(svg, width, y, s, own, text) {      // -> height; what the predictions lose as one head sees less, of all heads and of the chosen one
    const x0 = 60, right = width - 14, tall = 120, low = 1e-5, high = Math.max(...s.costs.flat());
    const across = w => x0 + Math.log2(w) / Math.log2(KEPT) * (right - x0), up = c => y + 14 + (1 - Math.log(Math.max(c, low) / low) / Math.log(high / low)) * tall;
    const line = (costs, more) => add(svg, 'path', {d: 'M' + costs.map((c, i) => `${across(s.sizes[i]).toFixed(1)} ${up(c).toFixed(1)}`).join('L'), fill: 'none', ...more});
    s.costs.forEach(costs => line(costs, {stroke: 'currentColor', 'stroke-opacity': .12}));
    line(s.costs[3 * s.layer + s.head], {stroke: WARM, 'stroke-width': 2.5});
    add(svg, 'path', {d: `M${across(Math.min(own, KEPT))} ${y + 14}v${tall}`, stroke: WARM, 'stroke-dasharray': '4 3'});
    for (const c of [1e-5, 1e-3, .1]) if (c <= high) text(x0 - 6, up(c) + 4, String(c), 'end');
    for (const w of [1, 16, 128, KEPT]) text(across(w), y + tall + 28, w + (w === KEPT ? ' back' : ''), w === KEPT ? 'end' : 'middle');
    text(x0, y + 8, 'what narrowing this head alone costs, in nats', 'start');
    return tall + 44;
  }
  function shares(s) { return [...new Set(s.runs.map(r => r[0]))].sort((a, b) => b - a); }
  function seeds(s) { return s.runs.filter(r => r[0] === shares(s)[s.at]).length; }
  function ofRun(s) {
    const share = shares(s)[s.at], [, , rise, widths] = s.runs.find(r => r[0] === share && r[1] === (seeds(s) > 1 ? +s.seed : 0));
    return {share, rise, widths};
  }

  // Of any model: `near`, `far`: how far 90 and 99 % of each head's weight lies, without the share `first` of the first token; `levels`: square roots of weights in `steps`, packed:
  // for each head rows of the last tokens, and what each token receives
  const LOOK = {title: 'Where the heads look', n: 1, tokens: [''], last: 1, steps: 1, near: [[0]], far: [[0]], first: [[0]], layer: 0, head: 0, token: 0, show: 'gives', levels: '', ...start};
  let unpacked = null;
  if (kind === 'look' && LOOK.levels) {
    const bytes = Uint8Array.from(atob(LOOK.levels), c => c.charCodeAt(0)), way = new DecompressionStream('deflate');
    new Response(new Blob([bytes]).stream().pipeThrough(way)).arrayBuffer().then(found => { unpacked = new Uint8Array(found); update(); });
  }
  const hidden = LOOK.tokens.length - LOOK.last, quoted = token => '“' + (token.trim() || '↵') + '”', headOf = s => Math.min(s.head, LOOK.near[s.layer].length - 1);
  KINDS.look = {
    title: LOOK.title, start: LOOK,
    controls: [slider('layer', 'layer', 0, LOOK.near.length - 1, 1), slider('head', 'head', 0, Math.max(...LOOK.near.map(r => r.length)) - 1, 1),
      choice('show', 'shade', {gives: 'by what one token gives to each', gets: 'by what each token receives'}),
      {...slider('token', 'the token that looks', 0, LOOK.last - 1, 1), used: s => s.show === 'gives', says: i => quoted(LOOK.tokens[hidden + i])}],
    compute(s) {
      const head = headOf(s), before = LOOK.near.slice(0, s.layer).reduce((sum, row) => sum + row.length, 0) + head, size = LOOK.tokens.length;
      const at = (before * (LOOK.last + 1) + (s.show === 'gives' ? s.token : LOOK.last)) * size;
      const weights = unpacked ? Array.from(unpacked.slice(at, at + size), x => (x / LOOK.steps) ** 2) : [];
      return {layer: s.layer, head, near: LOOK.near[s.layer][head], far: LOOK.far[s.layer][head], first: LOOK.first[s.layer][head], weights};
    },
    words: v => [['the first token gets', v.first + ' %'], ['90 % of the rest lies within', v.near + ' tokens'], ['99 %', v.far + ' tokens'],
      ['shown', LOOK.n > LOOK.tokens.length ? `the last ${LOOK.tokens.length} of ${LOOK.n} tokens` : `${LOOK.n} tokens`], ['can be chosen', hidden ? `the last ${LOOK.last}` : 'all']],
    verdict(v, s) {
      const best = v.weights.map((w, i) => [w, i]).sort((a, b) => b[0] - a[0]).slice(0, 3).filter(([w]) => w > .005).map(([w, i]) =>
        quoted(LOOK.tokens[i]) + (s.show === 'gives' ? ` ${(100 * w).toFixed(0)} %` : '')).join(', ');
      return ['good', `Layer ${v.layer}, head ${v.head}. ` + (s.show === 'gives' ? `${quoted(LOOK.tokens[hidden + s.token])} gives ${LOOK.n > LOOK.tokens.length ? 'most, of the tokens shown,' : 'most'} to ${best || 'none'}.` : `Most is received by ${best}.`)];
    },
    draw(svg, width, s, v) {
      const x0 = 26, heads = Math.max(...LOOK.near.map(r => r.length)), wide = (width - x0) / heads, tall = LOOK.near.length > 16 ? 12 : 18;
      const label = (x, y, words, anchor) => add(svg, 'text', {x, y, 'text-anchor': anchor, 'font-size': 12, fill: 'currentColor'}, words);
      for (let h = 0; h < heads; h += wide > 22 ? 1 : 4) label(x0 + (h + .5) * wide, 12, String(h), 'middle');
      LOOK.near.forEach((row, layer) => row.forEach((near, head) => {
        const x = x0 + head * wide, y = 20 + tall * layer, here = layer === v.layer && head === v.head;
        if (!head && (tall > 12 || layer % 5 === 0)) label(x0 - 6, y + tall - 3, String(layer), 'end');
        const cell = add(svg, 'rect', {x: x + 1, y: y + 1, width: wide - 2, height: tall - 2, fill: INK, 'fill-opacity': .08 + .92 * near / LOOK.n, style: 'cursor:pointer'});
        if (here) add(svg, 'rect', {x: x + 1, y: y + 1, width: wide - 2, height: tall - 2, fill: 'none', stroke: WARM, 'stroke-width': 3});
        add(cell, 'title', {}, `layer ${layer}, head ${head}: 90 % within ${near} tokens, 99 % within ${LOOK.far[layer][head]}`);
        cell.addEventListener('pointerdown', () => choose({layer, head}));
      }));
      const top = 20 + tall * LOOK.near.length + 18;
      label(0, top, 'A row for each layer. Fuller: the head looks further.', 'start');
      const most = Math.max(...v.weights, 1e-9);
      return shadeText(svg, width, top + 30, LOOK.tokens, i => v.weights[i] ? .85 * (v.weights[i] / most) ** .7 : 0, i => s.show === 'gives' && i === hidden + s.token,
        i => i >= hidden && (() => choose({show: 'gives', token: i - hidden})));
    }};
