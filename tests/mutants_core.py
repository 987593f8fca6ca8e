"""Faults planted in core.cpp, one at a time, and whether the checks of test_native.py find them.

python tests/mutants_core.py [NUMBER ...]       those faults; without a number all of them

Each is (text, text instead). A fault is built into a library of its own in a temporary
folder; the cases and what they should give are worked out once, and a fork runs them with the library."""
import ctypes, os, sys, tempfile, time
from pathlib import Path

MUTANTS = [
    # bounds
    ("std::min(piece[1].hi, hi), false", "hi, false"),
    ("hi = at+nq+head.right;", "hi = at+nq+head.right-1;"),
    ("lo = std::max(piece[1].lo, at-head.left), hi", "lo = std::max(piece[1].lo, at-head.left+1), hi"),
    ("if (far && c.is_causal) hi = std::min(hi, at+nq);", "if (far && c.is_causal) hi = std::min(hi, at+nq-1);"),
    ("return k.p+std::min(Int(l0+l), keys-1)*k.row; };", "return k.p+Int(l0+l)*k.row; };"),
    ("for (; r < rows; r++) micro<1,V>", "for (; r+1 < rows; r++) micro<1,V>"),
    ("std::min(text.origin+c.n_global, text.k1)", "std::min(text.origin+c.n_global-1, text.k1)"),
    ("while (x.k0 < x.k1 && !keep[x.k1-1]) x.k1--;", "while (x.k0 < x.k1 && !keep[x.k1-1]) x.k1 -= 2;"),
    ("return n+p.lead+5;", "return n-40;"),
    # strides and places
    ("return x.data+(b*x.b+h*x.h+i*x.n)*bytes_of(c.kind);", "return x.data+(b*x.b+h*x.n+i*x.n)*bytes_of(c.kind);"),
    ("const Int row_bytes = x.like.n*bytes_of(c.kind);", "const Int row_bytes = x.d*bytes_of(c.kind);"),
    ("*sum = to+first%LANES*length+first/LANES*LANES", "*sum = to+first%LANES*length+(first/LANES+1)*LANES"),
    ("seeds[i] = row_seed(c.seed, head.b*c.H+head.h, row+i);", "seeds[i] = row_seed(c.seed, head.h, row+i);"),
    ("write(g.dsink, &Sums::sink, 1);", "write(g.dsink, &Sums::alpha, 1);"),
    ("enum { SIGMA, ALPHA, SINK, TABLE };", "enum { SIGMA, ALPHA, SINK = 1, TABLE };"), # two sums in one place
    ("c.texts+5*(c.text_of[b]+t)", "c.texts+5*(c.text_of[0]+t)"),
    # lanes, signs, constants
    ("t = x < 0 ? -t : t;", "t = x < 0 ? t : t;"),
    ("return x == x ? t : x;", "return t;"),
    (".5550347269e-1f", ".5551347269e-1f"),
    ("9.618129107628477e-3", "9.618139107628477e-3"),
    ("L::exp2(top[v]-high), all", "L::exp2(high-top[v]), all"),
    ("unsolved = size >= enough,", "unsolved = size >= real(.1),"),
    ("eps <= real(.5) ? std::sqrt(C::converged)/4 : C::converged;", "std::sqrt(C::converged)/4;"),
    ("store(slopes+i, 1-t*t);", "store(slopes+i, 1-t);"),
    ("pulled += s*grad(j);", "pulled += w*grad(j);"),
    ("*head.found.sink() -= std::exp2(", "*head.found.sink() += std::exp2("),
    ("dalpha -= ds*(solver.phi(t, ", "dalpha -= s*(solver.phi(t, "),
    ("((l-1)*(t+1)+1)*(by*by)", "((l-1)*(t+1)+1)*by"),
    ("terms[k] = real((k-1)*inverse_factorial(k));", "terms[k] = real(k*inverse_factorial(k));"),
    # rounding
    ("(u + 0x7fff + (u >> 16 & 1)) >> 16", "(u + 0x8000) >> 16"),
    ("(size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13", "(size + 0x1000 - 0x38000000) >> 13"),
    ("else if (size >= 0x477ff000) size = 0x7c00;", "else if (size >= 0x48800000) size = 0x7c00;"),
    # numbers that are none
    ("broken |= largest_key == INFINITY || largest_of_values == INFINITY;", "broken |= largest_key == INFINITY;"),
    ("broken |= largest_key == INFINITY || largest_of_values == INFINITY;", "broken |= largest_of_values == INFINITY;"),
    ("if (!guard.reads_keys()) n_spans = n_keys = 0;", ""),
    ("for (Int j = 0; alone && j < n; j++) broken |=", "for (Int j = 1; alone && j < n; j++) broken |="),
    ("guard.begin_text(q1-q0 == 1 && !g && !c.alpha.data);", "guard.begin_text(q1-q0 == 1 && !g);"),
    ("y > most ? y : most", "y < most ? y : most"),
    ("if (!is_hole(key+j)) read_row(", "read_row("),
    # zeros
    ("some |= x > low[v];", "some |= x > low[v]+real(.2);"),       # a key dropped too early
    ("some |= w > 0;\n                    if (to", "some |= w > real(1e-2);\n                    if (to"),
    ("some |= w > 0;\n                store(S+to", "some = w > 0;\n                store(S+to"),   # only the last vector's queries
    ("static INLINE bool any(ivec x) {", "static INLINE bool any(ivec x) { x[LANES-1] = 0;"), # a lane's survivor
    ("live[left] = live[j];", "live[left] = (int32_t)j;"), # entries of an older list
    ("law(load(best+j*QUERIES+v*LANES)-top[v]-a[v], w, s);", "law(load(best+j*QUERIES+v*LANES)-top[v]-a[v]+real(.5), w, s);"), # no lower bound
    ("i < std::min<Int>(j+GROUP, n)", "i < std::min<Int>(j+GROUP, n)-1"),                # the last key of a group counts for nothing
    ("return (uint8_t*)c.kept+in_call(0)*KEPT;", "return (uint8_t*)c.kept+in_call(-this->row%QUERIES)*KEPT;"), # of another block
    ("bits = guard.broken ? 255 : of[i/8]", "bits = of[i/8]"),                                      # bits that a block of one query did not leave
    ("return some*GROUP*4 > n*3;", "return false;"),                           # nearly all keys are gathered
    ("return some*GROUP*4 > n*3;", "return true;"),                            # zeros are multiplied
    ("end = std::min(j+(Int(1) << by), n_keys);", "end = std::min(j+1, n_keys);"), # the other keys of a bit
    ("const bool all = guard.broken || m == n_keys;", "const bool all = false;"),                      # and those that it should leave
    ("return last-first == n-1 && &span_of(first) == &span_of(last);", "return last-first == n-1;"), # leading keys and others lie apart
    ("if (c.alpha.data) end = std::min(end, next_block);", ""),    # blocks of the passes differ
    ("fetch(row_at(i+std::min(j+8, n-1)), width*sizeof(real));\n            for (Int e = 0; e < width; e += LANES) store(x+e, load(x+e)+load(y+e));",
     "for (Int e = 0; e < width; e += LANES) store(x+e, load(y+e));"),            # gradients of a gathered key set, not added
    ("m -= m && live[m-1] == n_keys;", ""),           # the sink as a key with a value
    ("lost[i] = no_alpha || most == INFINITY;", "lost[i] = most == INFINITY;"), # alpha above 2
    ("size*size*size/(last[v]*last[v])", "size*size*size"),                    # a last step that is not small
    ("by[v] = (of_row-1)/", "by[v] = (of_row-1)/2/"),
    # rows by themselves
    ("if ((j+1)*LANES <= cols) return load(row+j*LANES);", "if (j*LANES <= cols) return load(row+j*LANES);"),
    ("if (eps == 1) return (sum > 0 ? sum-1 : sum)/by;", "if (eps == 1) return (sum > 0 ? sum-1 : sum)/by/2;"),
    ("&& eps[(i+n)*step] == worker.eps) n++;", ") n++;"),
    ("bad |= !(x < splat(INFINITY));", ""),
    ("if (m < n) std::fill(dz, dz+cols, 0);", ""),
    ("some ? take(g, j, 0) : splat(0);", "take(g, j, 0);"),
    # the newest query of every head
    ("reach = {std::max(reach.left, r.left), ", "reach = {reach.left, "),       # keys of a wider head
    ("x.hi = x.lo+std::max(std::min(end, n), lo);", "x.hi = x.lo+std::max(std::min(end-1, n), lo);"),   # the last one of a part
    ("place[i] = next;", "place[i] = 0;"),                                     # leading keys and others in one place
    ("if (s.lo > lo) hi = std::min(hi, s.lo);", ""),                           # heads that begin to see later
    ("if (n%2) work(run, some+n-1, ", "if (n == 1) work(run, some, "),         # the third head
    ("std::fill(to+n, to+end, -INFINITY);", ""),                               # lanes behind the last key
    ("if (s.far && head.bias) to[j] += head.unit*", "if (s.far && head.bias) to[j] += "),
    ("if (keys.is_hole(s.lo+j)) to[j] = -INFINITY;", ""),
    ("sum += *x.sum*by[0];", "sum += *x.sum;"),
    ("load(o_rows+e)+load(x.values+e)*by);", "load(o_rows+e)+load(x.values+e));"),
    ("bad |= !((y <= most) & (y >= -most));", ""),
    ("if (keys.way == keys.LYING) L::gather(values, p.dv_width);", ""),
    ("L::gather(o_rows+i*p.dv_width, p.dv_width);", ";"),
    ("if (!finite) return false;", ""),
    ("row = p.whole_text(b, t).q0;", "row = 0;"),
    # tasks
    ("return std::min(p.c.N, rounded(std::max(rows, least), TALL));", "return std::min(p.c.N, rounded(rows, TALL));"),
    ("cleared = i%2 ? clear : start(i+2);", "cleared = i%2 ? clear : start(i+1);"),
    ("for (auto &t : others) t.join();", "for (auto &t : others) t.detach();"),
    # weights that somebody looks at
    ("if (column >= c.columns || (s.piece && column < p.lead)) return;", ""),
    ("column = s.piece ? key-c.first_key+p.lead : key;", "column = s.piece ? key-c.first_key : key;"),
    ("to[i*c.columns] = w[i]*by[i];", "to[i*c.columns] = w[i];"),
    ("multiply(x, factor, 1);", "multiply(x, factor, 0);"),
    ("show(s, key, S+i*QUERIES, all);", "show(s, key, S+i*QUERIES, high);"),
]

def checks(core, lib, made):
    "The first check that fails, or None; runs in a fork."
    import torch, test_native as t
    core.library = lambda: lib
    try:
        t.powers_of_two()
        t.rows_of_entmax()
        t.float32_is_right_to_millionths()
        t.test_an_alpha_above_two_is_nan_and_never_another_law()
        t.zeros_of_long_rows()
        t.keys_near_the_threshold()
        t.most_keys_stay_and_few_do()
        t.passes_cut_in_other_places()
        for at_end,exact in made: t.between_guards(exact, at_end)
        for dtype in (torch.bfloat16,torch.float16): t.test_every_number_of_sixteen_bits(dtype)
        for dtype in (torch.float32,torch.float64,torch.bfloat16): t.test_few_queries_read_no_key_too_many(dtype)
        for softcap in (None,2.):
            for alpha in (None,1.5): t.test_a_key_that_is_no_number(softcap, alpha)
        t.a_query_alone_is_lost_as_among_others()
        t.a_query_alone_is_lost_as_among_others(torch.bfloat16)
        t.newest_queries(trials=160)
        t.lost_newest_queries()
        t.newest_queries_of_texts()
        t.a_capped_score_that_is_no_number()
        import test_banded as b
        class Nothing:
            def setattr(self, *args): core.library = args[2]
            def context(self): return self
            def __enter__(self): return self
            def __exit__(self, *args): core.library = lambda: lib
        b.test_dropout_does_not_depend_on_the_engine(Nothing())
        for which in ('query','key','value'):
            for alpha in (None,1.5): b.test_a_number_that_is_lost_is_seen_by_those_who_look('core', which, alpha)
        for case in CASES['padded']: b.test_padding_counts_for_nothing.hypothesis.inner_test('core', case)
        b.test_any_number_of_threads_gives_the_same_bits()
        b.test_weights_at_an_edge_that_rounding_moves('core', torch.float32)
        for case in CASES['weights']: b.test_weights_equal_dense.hypothesis.inner_test('core', case)
        for seed in range(2): t.same_as_dense_when_long(seed)
    except BaseException as e: return f'{type(e).__name__}: {str(e)[:60]!r}'
CASES = {}

def verdict(pid, pipe, seconds=240):
    "What a fork found: its words, a signal, or that it did not end."
    end = time.monotonic()+seconds
    while time.monotonic()<end:
        done,status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return f'signal {-code}' if code<0 else os.read(pipe, 1000).decode()
        time.sleep(.05)
    os.kill(pid, 9); os.waitpid(pid, 0)
    return 'no end'

def run(numbers, examples=150):
    "Print what became of each fault; those that no check found."
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from hypothesis import HealthCheck, Phase, given, settings, strategies as st
    import sanitize_native, test_native
    from test_banded import cases
    from dynattn.engine.native import core
    torch.set_num_threads(1)
    made,source = [],sanitize_native.SOURCE.read_text(encoding='utf-8')
    quick = settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @quick
    @given(case=cases(), dtype=test_native.DTYPES, at_end=st.booleans(), projected=st.booleans())
    def collect(case, dtype, at_end, projected):
        made.append((at_end,test_native.exact_case(case, dtype, projected)))
        for name,wanted in dict(padded='padding' in case[1], weights=True).items():
            if wanted: CASES.setdefault(name, []).append(case)
    collect()
    for name in CASES: CASES[name] = CASES[name][:30]
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        for i in [-1,*numbers]:
            old,new = MUTANTS[i] if i>=0 else ('','')
            assert i<0 or source.count(old)>=1,f'not in core.cpp: {old}'
            path = Path(folder)/f'{i}.cpp'
            path.write_text(source.replace(old, new, 1) if i>=0 else source, encoding='utf-8')
            lib = core._typed(ctypes.CDLL(str(sanitize_native.build(folder, '', path=path))))
            pipe,end = os.pipe()
            pid = os.fork()
            if not pid:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.write(end, (checks(core, lib, made) or '').encode()); os._exit(0)
            os.close(end)
            found = verdict(pid, pipe)
            os.close(pipe)
            if i<0: assert not found,f'without a fault: {found}'
            elif not found: survived.append(i)
            print(f'{i:3} {"found   " if found else "SURVIVED" if i>=0 else "no fault"} {old[:60]!r} {found}', flush=True)
    return survived

if __name__=='__main__':
    left = run([int(a) for a in sys.argv[1:]] or range(len(MUTANTS)))
    print(f'{len(left)} not found: {left}')
    sys.exit(bool(left))
