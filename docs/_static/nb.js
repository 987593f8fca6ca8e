// A link opens every fold that its target stands in; a link to an entry of the API also opens its table, and one to an
// example the fold beneath it.
const reveal = () => {
  const name = decodeURIComponent(location.hash.slice(1));
  const entry = name && document.querySelector(`details[data-of="${CSS.escape(name)}"]`);
  const fold = entry || name.startsWith('use-') && document.getElementById(name)?.nextElementSibling?.querySelector('details');
  if (fold) fold.open = true;
  const target = name ? document.getElementById(name) : null;
  let shut = false;
  for (let d = target?.closest('details:not([open])'); d; d = d.parentElement.closest('details:not([open])')) d.open = shut = true;
  if (shut) target.scrollIntoView();
};
addEventListener('hashchange', reveal);
addEventListener('DOMContentLoaded', reveal);

// On paper nothing is folded.
addEventListener('beforeprint', () => document.querySelectorAll('details.nb-part').forEach(d => d.open = true));

// The sidebar shows the current page.
addEventListener('DOMContentLoaded', () => {
  const here = document.querySelector('.sidebar-tree .current-page > a'), list = here?.closest('.sidebar-scroll');
  const down = list && here.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 3;
  if (list) list.scrollBy({top: down, behavior: 'instant'});
});
