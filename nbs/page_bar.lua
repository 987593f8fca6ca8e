-- Beneath a page's title: Colab, the notebook to download, and how long it takes (times.json).
-- For Quarto; docs/build_site.py writes the same line for the site that is made without it.
local function times()
  local f = io.open('times.json') or io.open('../times.json') or io.open('../../times.json')
  if not f then return {} end
  local t = pandoc.json.decode(f:read('a')); f:close()
  return t.seconds
end

function Pandoc(doc)
  local name = pandoc.path.make_relative(quarto.doc.input_file, quarto.project.directory)
  if not name:match('%.ipynb$') then return end
  local items = {
    pandoc.Link('Open in Colab', pandoc.utils.stringify(doc.meta['colab-base']) .. name), pandoc.Str(' · '),
    pandoc.Link('Download the notebook', string.rep('../', select(2, name:gsub('/', '/'))) .. 'notebooks/' .. name, '', {download = ''}) }
  local s = times()[name]
  if s then table.insert(items, pandoc.Str(string.format(' · runs in %d s on one core', math.max(1, math.floor(s + .5))))) end
  table.insert(doc.blocks, 1, pandoc.Para(items))
  return doc
end
