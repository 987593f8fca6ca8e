// What is wrong with the page as it now stands: a list of sentences. Called with the checks to make.
(checks) => {
  const bad = [], seen = e => e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true});
  const name = e => `<${e.tagName.toLowerCase()} class="${e.getAttribute('class') || ''}"> ${(e.textContent || '').trim().slice(0, 40)}`;
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true});
  const rgba = c => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
  const over = (f, b) => [0, 1, 2].map(i => f[i] * f[3] + b[i] * (1 - f[3])).concat(1);
  const lum = c => { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const contrast = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const back = e => { const cs = []; for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); cs.push(c); if (c[3] === 1) break; } return cs.reduceRight((b, f) => over(f, b), [255, 255, 255, 1]); };

  if (checks.includes('formulas')) {
    for (const e of document.querySelectorAll('.math')) if (!e.querySelector('mjx-container svg use, mjx-container svg text')) bad.push('formula not rendered: ' + name(e));
    for (const e of document.querySelectorAll('mjx-container use')) if (!document.getElementById(e.getAttribute('xlink:href').slice(1))) bad.push('letter without its outline: ' + e.outerHTML);
  }
  const walk = document.createTreeWalker(document.querySelector('.page'), NodeFilter.SHOW_TEXT);
  for (let t; (t = walk.nextNode());) {
    const e = t.parentElement;
    if (!t.data.trim() || e.closest('script, style, noscript, mjx-container, svg') || !seen(e)) continue;
    if (checks.includes('formulas') && !e.closest('pre, code') && /\$[^$\d][^$]*\$|\\frac|\{#|:::/.test(t.data)) bad.push('markup left as text: ' + t.data.trim().slice(0, 60));
    if (checks.includes('contrast')) {
      const s = getComputedStyle(e), b = back(e), r = contrast(over(rgba(s.color), b), b), px = parseFloat(s.fontSize);
      if (r < (px >= 24 || (px >= 18.6 && s.fontWeight >= 700) ? 3 : 4.5)) bad.push(`contrast ${r.toFixed(1)} of ${s.color}: ` + name(e));
    }
  }
  if (checks.includes('alt')) for (const e of document.querySelectorAll('article a[href]'))
    if (seen(e) && !e.textContent.trim() && !e.getAttribute('aria-label') && !e.querySelector('img[alt], svg')) bad.push('link without words: ' + e.outerHTML);
  for (const e of document.querySelectorAll('article img')) {
    if (checks.includes('alt') && (e.alt.trim().length < 15 || /\.(png|svg)$|^_images/.test(e.alt))) bad.push('figure without alternative text: ' + e.src);
    if (!e.naturalWidth) bad.push('image that does not load: ' + e.src);
    else if (checks.includes('contrast')) {       // the ink of text and axes: of a transparent figure the commonest opaque grey, where runs, such as a cell's fill, count once
      const c = Object.assign(document.createElement('canvas'), {width: e.naturalWidth, height: e.naturalHeight}).getContext('2d');
      c.drawImage(e, 0, 0); const d = c.getImageData(0, 0, e.naturalWidth, e.naturalHeight).data, n = {}; let clear = 0;
      for (let i = 0; i < d.length; i += 4) {
        if (d[i + 3] < 20) clear++;
        else if (d[i + 3] > 230 && (d[i] !== d[i - 4] || d[i + 3] !== d[i - 1]) && Math.max(d[i], d[i + 1], d[i + 2]) - Math.min(d[i], d[i + 1], d[i + 2]) < 24) { const k = [d[i], d[i + 1], d[i + 2]].join(); n[k] = (n[k] || 0) + 1; }
      }
      const ink = Object.entries(n).sort((a, b) => b[1] - a[1])[0];
      if (clear > d.length / 40 && ink) { const r = contrast(ink[0].split(',').map(Number), back(e)); if (r < 4.5) bad.push(`figure's ink ${ink[0]} has contrast ${r.toFixed(1)}: ` + e.alt); }
    }
  }
  if (checks.includes('width')) {
    const w = innerWidth, root = document.scrollingElement;
    if (root.scrollWidth > w) bad.push(`the page is ${root.scrollWidth} px wide`);
    for (const e of document.querySelectorAll('article *')) {
      if (e.getBoundingClientRect().right <= w + 1 || !seen(e)) continue;
      const box = e.parentElement.closest('pre, .table-wrapper, .math, .cell_output, p:has(> img:only-child)');       // what may scroll in itself
      if (!box || box.getBoundingClientRect().right > w + 1 && !box.parentElement.closest('.cell_output, .table-wrapper')) bad.push('wider than the screen: ' + name(e));
    }
  }
  return [...new Set(bad)].slice(0, 12);
}
