  // The explorer of what heads learned. `show_widget` puts it into widgets.js, for its page only
  const KEPT = 2048;
  KINDS.heads = {      // `runs`: share, seed, rise of the loss, widths; `texts`: layer, head, weights of the tokens; `tokens`: a text's end
    title: 'What 90 heads of a language model need',
    controls: [{...slider('at', 'keys kept, of 2,048 tokens', 0, 4, 1), says: (at, s) => (100 * shares(s)[at]).toFixed(0) + ' %'},
      {...choice('seed', 'run (three at 25 %)', {0: 'first', 1: 'second', 2: 'third'}), used: s => seeds(s) > 1},
      slider('layer', 'layer', 0, 29, 1), slider('head', 'key head', 0, 2, 1)],
    start: {at: 2, seed: '0', layer: 19, head: 2, runs: [], texts: [], tokens: []},
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
      let x = 0, y = 410;
      const most = Math.max(...(v.weights || [1]));
      s.tokens.forEach((token, i) => {
        const shown = (i ? token : token.trimStart()).replace(/\s*\n\s*/g, ' ↵ '), size = 7.3 * shown.length, back = s.tokens.length - 1 - i;
        if (x && x + size > width) { x = 0; y += 22; }
        if (v.weights) add(svg, 'rect', {x, y: y - 13, width: size, height: 18, fill: WARM, 'fill-opacity': .75 * v.weights[i] / most});
        if (back <= v.width) add(svg, 'path', {d: `M${x} ${y + 4}h${size}`, stroke: WARM, 'stroke-width': 2});
        text(x, y, shown, 'start', {'font-family': 'ui-monospace,monospace', 'xml:space': 'preserve', style: 'white-space:pre', 'textLength': size, 'lengthAdjust': 'spacingAndGlyphs'});
        x += size;
      });
      return y + 12;
    }};
  function shares(s) { return [...new Set(s.runs.map(r => r[0]))].sort((a, b) => b - a); }
  function seeds(s) { return s.runs.filter(r => r[0] === shares(s)[s.at]).length; }
  function ofRun(s) {
    const share = shares(s)[s.at], [, , rise, widths] = s.runs.find(r => r[0] === share && r[1] === (seeds(s) > 1 ? +s.seed : 0));
    return {share, rise, widths};
  }
