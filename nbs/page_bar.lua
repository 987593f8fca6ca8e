-- 1. The parts of a chapter below its lesson stand in a callout that is shut.
-- 2. Beneath a page's title: Colab, the notebook to download, and how long it takes (times.json).
-- For Quarto; docs/build_site.py writes the same line for the site that is made without it.
local function times()
  local f = io.open('times.json') or io.open('../times.json') or io.open('../../times.json')
  if not f then return {} end
  local t = pandoc.json.decode(f:read('a')); f:close()
  return t.seconds
end

local FOLDED = {['in-the-library'] = true, ['from-the-sources'] = true, solutions = true}

local function shut(heading, blocks)
  local title = pandoc.utils.stringify(heading.content)
  return pandoc.Div(blocks, pandoc.Attr('', {'callout-note'}, {collapse = 'true', title = title, icon = 'false'}))
end

local function fold_parts(blocks)
  local out, heading, inside = {}, nil, {}
  local function close()
    if heading then table.insert(out, shut(heading, inside)) end
    heading, inside = nil, {}
  end
  for _, block in ipairs(blocks) do
    if block.t == 'Header' and block.level <= 2 then
      close()
      table.insert(out, block)
      if FOLDED[block.identifier] then heading = block end
    else
      table.insert(heading and inside or out, block)
    end
  end
  close()
  return out
end

function Pandoc(doc)
  local name = pandoc.path.make_relative(quarto.doc.input_file, quarto.project.directory)
  if not name:match('%.ipynb$') then return end
  local items = {
    pandoc.Link('Open in Colab', pandoc.utils.stringify(doc.meta['colab-base']) .. name), pandoc.Str(' · '),
    pandoc.Link('Download the notebook', string.rep('../', select(2, name:gsub('/', '/'))) .. 'notebooks/' .. name, '', {download = ''}) }
  local s = times()[name]
  if s then table.insert(items, pandoc.Str(string.format(' · runs in %d s on one core', math.max(1, math.floor(s + .5))))) end
  doc.blocks = pandoc.Blocks(fold_parts(doc.blocks))
  table.insert(doc.blocks, 1, pandoc.Para(items))
  return doc
end
