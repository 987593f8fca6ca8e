// Orders the pages that Sphinx's search finds by WEIGHTS and SYNONYMS, which ranking.py writes in front of this file:
// word -> {page: weight}, and a word that a reader may use -> words of the pages.
(() => {
  const near = (a, b) => {     // one letter more, fewer, other, or two exchanged
    if (a === b || Math.abs(a.length - b.length) > 1) return a === b;
    let i = 0, j = 0;
    while (i < a.length && a[i] === b[i]) i++;
    while (j < a.length - i && j < b.length - i && a[a.length - 1 - j] === b[b.length - 1 - j]) j++;
    const left = a.slice(i, a.length - j), right = b.slice(i, b.length - j);
    return left.length <= 1 && right.length <= 1 || left.length === 2 && left === right[1] + right[0];
  };
  function found(word) {     // page -> weight: by the word, or by what the pages call it, which counts a little less
    const pages = {...byWord(word)};
    for (const other of SYNONYMS[word] || []) for (const [page, x] of Object.entries(WEIGHTS[other] || {}))
      pages[page] = Math.max(pages[page] || 0, .7 * x);
    return pages;
  }
  function byWord(word) {     // the word itself, else words that begin with it, else words with a slip
    if (WEIGHTS[word]) return WEIGHTS[word];
    const begins = word.length > 2 ? Object.keys(WEIGHTS).filter(w => w.startsWith(word)) : [];
    const like = begins.length || word.length < 5 ? begins : Object.keys(WEIGHTS).filter(w => near(word, w));
    const pages = {};
    for (const w of like) for (const [page, x] of Object.entries(WEIGHTS[w])) pages[page] = Math.max(pages[page] || 0, x / 2);
    return pages;
  }
  Search.performTermsSearch = (searchTerms, excludedTerms) => {
    const {docnames, titles, filenames} = Search._index, scores = new Map();
    for (const word of searchTerms) for (const [page, x] of Object.entries(found(word))) {
      const s = scores.get(page) || {sum: 0, words: 0};
      scores.set(page, {sum: s.sum + x, words: s.words + 1});
    }
    for (const word of excludedTerms) for (const page of Object.keys(WEIGHTS[word] || {})) scores.delete(page);
    const enough = [...scores].filter(([, s]) => 2 * s.words >= searchTerms.size);
    const whole = s => s.sum * (s.words / searchTerms.size) ** 2, best = Math.max(...enough.map(([, s]) => whole(s)));
    const top = searchTerms.size > 1 ? 30 : 14;      // an exact name of one word goes first, with 16
    return enough.map(([page, s]) => {
      const i = docnames.indexOf(page);
      return [page, titles[i], '', null, top * whole(s) / best, filenames[i], SearchResultKind.text];
    }).filter(r => r[1] !== undefined);
  };

  // Excerpts keep their formulas as TeX and leave the line beneath the title out.
  const plain = Search.htmlToText;
  Search.htmlToText = (text, anchor) => {
    const page = new DOMParser().parseFromString(text, 'text/html');
    page.querySelectorAll('.nb-bar').forEach(e => e.remove());
    page.querySelectorAll('mjx-container').forEach(e => e.replaceWith(e.getAttribute('aria-label') || e.querySelector('[aria-label]')?.getAttribute('aria-label') || ''));
    return plain(page.documentElement.outerHTML, anchor);
  };
})();
