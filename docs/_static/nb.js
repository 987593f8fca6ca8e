// A link to an entry of the API opens its table, and a link to an example opens the fold that it stands in.
const reveal = () => {
  const name = decodeURIComponent(location.hash.slice(1));
  const entry = name && document.querySelector(`details[data-of="${CSS.escape(name)}"]`);
  const fold = entry || name.startsWith('use-') && document.getElementById(name)?.nextElementSibling?.querySelector('details');
  if (fold) fold.open = true;
};
addEventListener('hashchange', reveal);
addEventListener('DOMContentLoaded', reveal);

// The sidebar shows the current page.
addEventListener('DOMContentLoaded', () => {
  const here = document.querySelector('.sidebar-tree .current-page > a'), list = here?.closest('.sidebar-scroll');
  const down = list && here.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 3;
  if (list) list.scrollBy({top: down, behavior: 'instant'});
});
