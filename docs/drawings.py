"Drawings for the pages of the book only: boxes with arrows, and widgets. Notebooks import them from here."
import json, re
from pathlib import Path
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from dynattn.plot import INK, TEXT, grid, look

def _box_size(label, least):
    "Inches that a box needs for its label."
    lines = label.split('\n')
    return max(least, .066*max(map(len, lines))+.16), .135*len(lines)+.13

def _leave(centre, size, towards):
    "Where the line from a box's centre to `towards` meets its frame."
    step = np.subtract(towards, centre)
    share = min(s/2/abs(d) for s,d in zip(size, step) if d)
    return tuple(np.add(centre, share*step))

def _path(arrow, at, size):
    "The corners of an arrow: names become the points where it leaves one box and enters another."
    for stop in arrow:
        if isinstance(stop, str) and stop not in at:
            raise ValueError(f"arrows: expected names of boxes, got {stop!r}")
    centres = [at[stop] if isinstance(stop, str) else stop for stop in arrow]
    path = list(centres)
    if isinstance(arrow[0], str): path[0] = _leave(centres[0], size[arrow[0]], centres[1])
    if isinstance(arrow[-1], str):
        path[-1] = _leave(centres[-1], size[arrow[-1]], centres[-2])
    return path

def show_boxes(
    boxes:dict, # name -> (x, y) of its centre in inches, or (x, y, label); a page is 5.6 wide
    arrows=(), # tuples: a box, points (x, y) on the way if any, a box
    *,
    groups:dict|None=None, # title -> the boxes that a dashed frame holds together
    colors:dict|None=None, # box -> colour of its frame (default: `INK`)
    box_width:float=0., # inches that every box has at least
    title=None, # above the axes
    ax=None, # axes to draw into (default: a new figure)
) -> Axes:
    "Labelled boxes, the arrows between them, and frames around some."
    if not boxes: raise ValueError("boxes: expected at least one, got none")
    at = {name: (x, y) for name,(x,y,*_) in boxes.items()}
    label = {name: str(place[2]) if len(place)>2 else name for name,place in boxes.items()}
    size = {name: _box_size(label[name], box_width) for name in boxes}
    half = np.array(list(size.values()))/2
    centre = np.array(list(at.values()))
    corners = ([*(centre-half), *(centre+half)]
               + [p for arrow in arrows for p in arrow if not isinstance(p, str)])
    frames = {name: _frame(members, at, size) for name,members in (groups or {}).items()}
    for (left,low),(right,high) in frames.values():
        corners += [(left, low), (right, high+.16)]
    low,high = np.min(corners, 0)-.06, np.max(corners, 0)+.06
    with look():
        if ax is None:
            _,ax = grid(width=high[0]-low[0],
                        height=high[1]-low[1] + (.25 if title else 0))
        for name,(a,b) in frames.items():
            ax.add_patch(Rectangle(a, *np.subtract(b, a), facecolor='none',
                                   edgecolor=TEXT, lw=.7, ls='--'))
            ax.text(a[0], b[1]+.03, name, fontsize=7, va='bottom')
        for name,(x,y) in at.items():
            w,h = size[name]
            edge = (colors or {}).get(name, INK)
            ax.add_patch(Rectangle((x-w/2, y-h/2), w, h,
                                   facecolor='none', edgecolor=edge, lw=1.2))
            ax.text(x, y, label[name], ha='center', va='center', fontsize=7)
        for arrow in arrows:
            path = _path(arrow, at, size)
            ax.plot(*zip(*path), color=TEXT, lw=.9)
            ax.annotate('', path[-1], path[-2],
                        arrowprops=dict(arrowstyle='-|>', color=TEXT, lw=.9,
                                        shrinkA=0, shrinkB=0, mutation_scale=7))
        ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect='equal', title=title)
        ax.axis('off')
    return ax

def _frame(members, at, size):
    "The lower left and upper right corner of a frame around some boxes."
    for name in members:
        if name not in at: raise ValueError(f"groups: expected names of boxes, got {name!r}")
    low = np.min([np.subtract(at[name], np.divide(size[name], 2))
                  for name in members], 0) - .09
    high = np.max([np.add(at[name], np.divide(size[name], 2)) for name in members], 0) + .09
    return tuple(low), tuple(high)

# the number is that of a chapter
WIDGETS = ('sigma', 'window11', 'window12', 'window13', 'window14', 'alpha', 'alpha3', 'matrix', 'tiles', 'survey', 'heads')

class _Widget:
    "HTML that a notebook shows as it is."
    def __init__(self, html): self.html = html
    def _repr_html_(self): return self.html
    def __repr__(self): return 'a widget, which needs a page that runs JavaScript'

def show_widget(
    kind:str, # one of `WIDGETS`
    **start, # where its controls stand at first, by their names
) -> _Widget: # what a cell ends in
    "Sliders, a drawing and its numbers; the same kind should not stand twice on one page."
    if kind not in WIDGETS:
        raise ValueError(f"kind: expected one of {', '.join(WIDGETS)}, got {kind!r}")
    script,own = (Path(__file__).with_name(name) for name in ('widgets.js', f'widget_{kind}.js'))
    script = script.read_text(encoding='utf-8')
    if own.exists(): script = re.sub('  // KIND:.*\n', lambda m: own.read_text(encoding='utf-8'), script)
    name,values = f'dynattn-{kind}',json.dumps(start)
    call = f"dynattnWidget(document.getElementById('{name}'), '{kind}', {values})"
    return _Widget(f"<div id='{name}' class='dynattn-widget'>This widget needs JavaScript.</div>\n"
        f"<script>(() => {{\n{script}\n{call};\n}})();</script>")
