// Formulas as SVG, by MathJax without a browser: reads {page: [{tex, display}]}, writes {page: {formulas, glyphs}}.
const [folder] = process.argv.slice(2);

(async () => {
  const MathJax = await require(folder + '/node-main.js').init({
    loader: {load: ['input/tex-full', 'adaptors/liteDOM', 'output/svg']},
    tex: {packages: ['base', 'ams']},       // an unknown command is an error, not red letters
    svg: {fontCache: 'global'},       // the outline of a letter stands once on a page
  });
  const adaptor = MathJax.startup.adaptor, doc = MathJax.startup.document, svg = doc.outputJax;
  const pages = {};
  for (const [page, formulas] of Object.entries(JSON.parse(require('fs').readFileSync(0, 'utf8')))) {
    svg.clearFontCache();
    const drawn = formulas.map(({tex, display}) => adaptor.outerHTML(doc.convert(tex, {display, em: 16, ex: 8, containerWidth: 800})));
    pages[page] = {formulas: drawn, glyphs: adaptor.outerHTML(svg.fontCache.getCache())};
  }
  process.stdout.write(JSON.stringify(pages));
})().catch(e => { console.error(e); process.exit(1); });
