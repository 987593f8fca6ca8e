"""Comments of parameters as a part of docstrings, so that `help()` says what the page says.

Every chapter ends with `explain_parameters(__name__)`. It reads the text of the module once, when
it is imported; nothing is done in a call. fastcore's `docments` reads the same comments, but parses
each function: it takes fifty times as long."""
import inspect, re, sys

__all__ = ['field_comments', 'explain_parameters']

# A class, a method that is patched into one, a function, or any other statement that ends a class
_STATEMENT = re.compile(r"""^(?:
    class[ ](?P<cls>\w+)
    | @patch(?:_to\((?P<onto>\w+))?
    | (?P<indent>[ ]{4})?(?:async[ ])?def[ ](?P<name>\w+)\(
    | (?P<other>\w)
)""", re.M | re.X)
_TOKEN = re.compile(r"""
    \#[^\n]* | \n | "[^"\n]*" | '[^'\n]*' | [\[({] | [\])}] | , | [^\[\](){},'"\#\n]+ | .
""", re.X)
_OPENING,_CLOSING = {*'[({'},{*'])}'}
_PARAMETER = re.compile(r"\s*(?P<name>\*{0,2}\w+)\s*(?::\s*(?P<kind>.*?))?\s*(?:=.*)?$", re.S)
_RESULT = re.compile(r"\s*->\s*(.*?)\s*:(?:\s|$)", re.S)
_FIELD = re.compile(r"""^[ ]{4}(?:
    (?P<name>\w+)[ ]*:[ ]*(?P<kind>[^=\#\n]+?)[ ]*
        (?:=(?:[^\#\n"']|"[^"\n]*"|'[^'\n]*')*)?(?:\#[ ]?(?P<comment>.*))?
    | \#[ ]?(?P<above>.*)
    | (?P<end>def[ ]|async[ ]|@)
    | .*
)$""", re.M | re.X)
_TITLE = 'Parameters\n----------\n'
_RETURNS = 'Returns\n-------\n'
_CONSTRUCTORS = {}   # class -> {name: (type, comment)} of what its own source says

class _Part:
    "The text of one parameter, or of what follows the last, and comments behind or above it."
    def __init__(self, above):
        self.text,self.behind,self.above = '',[],above

    @property
    def comment(self): return ' '.join(self.behind or self.above)

class _Signature:
    "The parts of a signature as its tokens and lines are read, each with its comments."
    def __init__(self):
        self.parameters = []
        self.result = None     # what follows the parameters
        self.depth = 1         # of brackets; 0 behind the parameters
        self.current = None    # the parameter that the next token continues
        self.on_line = []      # parameters that have text on this line
        self.above = []        # comments that stand alone above the next part

    def read(self, token):
        self.depth += (token in _OPENING)-(token in _CLOSING)
        if self.result: self.result.text += token
        elif self.depth==0: self.result = self.begin_part()
        elif token==',' and self.depth==1: self.current = None
        elif self.current: self.current.text += token
        elif not token.isspace():
            self.current = self.begin_part()
            self.current.text = token
            self.parameters.append(self.current)
            self.on_line.append(self.current)

    def begin_part(self):
        part = _Part(self.above)
        self.above = []
        return part

    def end_line(self, comment):
        "A comment is about the parts on its line; if it stands alone, about the part that follows."
        is_of_result = self.result and _is_of_result(self.result.text)
        parts = [self.result] if is_of_result else self.on_line
        if comment and not parts: self.above.append(comment)
        elif comment:
            for part in parts: part.behind.append(comment)
        goes_on = self.current and not self.result
        self.on_line = [self.current] if goes_on else []

    @property
    def is_whole(self): return self.result and (self.depth==0 or ':' in self.result.text)

    def rows(self):
        rows = {}
        for part in self.parameters:
            found = _PARAMETER.match(part.text)
            if found: rows[found['name']] = _type(found['kind']), part.comment
        if self.result and self.result.comment:
            found = _RESULT.match(self.result.text)
            rows['return'] = _type(found and found[1]), self.result.comment
        return rows

def _signature(text, start):
    """{name: (type, comment)} of the signature whose parameters begin at `start`; 'return' is its
    result."""
    first_line = text[start:text.find('\n', start)]
    is_one_line = '):' in first_line or first_line.endswith(':')
    if is_one_line and '#' not in first_line: return {}
    signature,comment = _Signature(),''
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if token[0]=='#': comment = token[1:].strip()
        elif token=='\n':
            signature.end_line(comment)
            if signature.is_whole: break
            comment = ''
        else: signature.read(token)
    return signature.rows()

def _is_of_result(text):
    """Whether a line's comment is about the result: what stands behind the parameters has an arrow,
    or the body."""
    return '->' in text or text.strip()!=':'

def _method(text, start):
    "As `_signature`, without the class or its instance."
    rows = _signature(text, start)
    return {name: said for name,said in rows.items() if name not in ('self','cls')}

def _type(annotation):
    text = ' '.join((annotation or '').split())
    quoted = text[:1] in ("'", '"') and text.count(text[0])==2 and text[-1]==text[0]
    return text[1:-1] if quoted else text

def _fields(text, start, end):
    "{name: (type, comment)} of the annotated names of a class, up to its first method."
    rows,above = {},[]
    for match in _FIELD.finditer(text, start, end):
        if match['end']: break
        if match['above'] is not None:
            above.append(match['above'].strip())
            continue
        if match['name']:
            comment = match['comment'] or ' '.join(above)
            rows[match['name']] = _type(match['kind']), comment.strip()
        above = []
    return rows

def _names(cls):
    "The names of a constructor's parameters, those with stars as well."
    for function in (cls.__init__, cls.__new__):
        code = getattr(inspect.unwrap(function), '__code__', None)
        if code is None: continue
        stars = inspect.CO_VARARGS,inspect.CO_VARKEYWORDS
        starred = sum(bool(code.co_flags & star) for star in stars)
        return code.co_varnames[1:code.co_argcount+code.co_kwonlyargcount+starred]
    return ()

def _constructor(cls):
    "Comments in the source of a class and of its bases about the parameters of its constructor."
    known = {}
    for base in reversed(cls.__mro__):
        for name,(kind,comment) in _CONSTRUCTORS.get(base, {}).items():
            bare = name.lstrip('*')
            _,(_,of_base) = known.get(bare, ('', ('', '')))
            known[bare] = name, (kind, comment or of_base)
    return dict(known[name] for name in _names(cls) if name in known)

def _section(rows, doc):
    "The rows that `doc` lacks, in the form of numpydoc; neighbours of one comment share a row."
    shared = []      # names, their types, their comment
    for name,(kind,comment) in rows.items():
        if name=='return' or not comment: continue
        names,kinds,last = shared[-1] if shared else ([], [], None)
        if comment==last and bool(kind)==bool(kinds[-1]):
            names.append(name)
            kinds.append(kind)
        else: shared.append(([name], [kind], comment))
    text = ''
    if shared and _TITLE not in doc:
        text = '\n\n'+_TITLE+'\n'.join(_row(*row) for row in shared)
    if 'return' in rows and _RETURNS not in doc:
        kind,comment = rows['return']
        text += '\n\n'+_RETURNS+(f'{kind}\n    {comment}' if kind else comment)
    return text

def _row(names, kinds, comment):
    "One type where all are of one, else a type for each name."
    kind = kinds[0] if len({*kinds})==1 else ', '.join(kinds)
    return f"{', '.join(names)}{kind and f' : {kind}'}\n    {comment}"

def _without_sections(doc):
    section = r'^(?:Parameters|Returns)\n---'
    return re.split(section, inspect.cleandoc(doc), flags=re.M)[0].strip()

_DESCRIPTORS = property, staticmethod, classmethod
def _package(cls): return cls.__module__.partition('.')[0]

def _append(found, rows, cls=None, name=None):
    """The section joins the docstring of `found`, or the one that it inherits within its package:
    that of a method of PyTorch has arguments of its own."""
    if not rows: return
    doc = found.__doc__
    if doc is None and cls is not None:
        ours = (base for base in cls.__mro__[1:-1] if _package(base)==_package(cls))
        others = (vars(base).get(name) if name else base for base in ours)
        def is_code(other): return callable(other) or isinstance(other, _DESCRIPTORS)
        docs = (other.__doc__ for other in others if is_code(other))
        doc = next((_without_sections(d) for d in docs if d), None)
    doc = inspect.cleandoc(doc or '')
    section = _section(rows, doc)
    if section: found.__doc__ = (doc+section).strip()

def _definitions(text):
    """(class or None, name, rows) of each function and method; the name is None for the fields of a
    class."""
    cls,onto = None,''
    matches = [*_STATEMENT.finditer(text)]
    for match in matches:
        if match['cls']:
            cls = match['cls']
            yield cls, None, lambda start=match.end(): _fields(text, start, _class_end(text, start))
        elif match['name'] is None:
            cls = None
            onto = '' if match['other'] else match['onto'] or '@'
        elif match['indent']:
            if cls: yield cls, match['name'], lambda start=match.end(): _method(text, start)
        else:
            owner,cls = onto,None
            onto = ''
            if owner=='@': owner = re.compile(r"\s*\w+\s*:\s*'?(\w+)").match(text, match.end())[1]
            scan = _method if owner else _signature
            def read(start=match.end(), scan=scan): return scan(text, start)
            yield owner or None, match['name'], read

def _class_end(text, start):
    found = re.compile(r'^\w', re.M).search(text, start)
    return found.start() if found else len(text)

def _source(name):
    "The text of a module, or None where there is none to read."
    spec = getattr(sys.modules.get(name), '__spec__', None)
    read = getattr(getattr(spec, 'loader', None), 'get_source', None)
    if read is None: return None
    try: return read(name)
    except (ImportError, OSError): return None

def field_comments(
    cls:type, # a dataclass, also of a module that is still being imported
) -> dict[str,str]: # {name: comment}, without fields that have none
    "Comments of the fields of a class and of its bases, where their source can be read."
    comments = {}
    for base in reversed(cls.__mro__[:-1]):
        text = _source(base.__module__) or ''
        found = re.search(rf'^class {base.__name__}\b', text, re.M)
        if not found: continue
        rows = _fields(text, found.end(), _class_end(text, found.end()))
        comments |= {name: comment for name,(_,comment) in rows.items() if comment}
    return comments

def explain_parameters(
    name:str, # of the module that is being imported: its `__name__`
) -> None:
    """Add what comments say about parameters and results to the docstrings of a module's public
    functions and classes."""
    without_docstrings = sys.flags.optimize > 1
    text = None if name=='__main__' or without_docstrings else _source(name)
    if text is None: return
    module = sys.modules[name]
    classes = {}
    for owner,function,read in _definitions(text):
        cls = getattr(module, owner, None) if owner else None
        if owner and not isinstance(cls, type): continue
        if function in (None,'__init__','__new__'):
            if function is None:
                classes[cls] = owner
                if not (hasattr(cls, '__dataclass_fields__') or hasattr(cls, '_fields')): continue
                if '__init__' in vars(cls) and '__dataclass_fields__' not in vars(cls): continue
            rows = read()
            rows.pop('return', None)
            _CONSTRUCTORS[cls] = _CONSTRUCTORS.get(cls, {}) | rows
            continue
        is_public = not function.startswith('_') or function=='__call__'
        is_own = not owner or function in vars(cls)
        found = getattr(cls or module, function, None) if is_own else None
        if is_public and found is not None and not (owner or '').startswith('_'):
            _append(getattr(found, '__func__', found), read(), cls, function)
    for cls,owner in classes.items():
        if not owner.startswith('_'): _append(cls, _constructor(cls), cls)
