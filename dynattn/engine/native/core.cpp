// Attention inside a window on a CPU: softmax or entmax, forward and backward, in one file without
// dependencies.
//
// Sixteen queries lie side by side in the vector lanes, and scores are kept as S[key][query]. So
//   - every product is one micro-kernel, C[r][:] += sum_k A[r,k] B[k][:], which reads keys and
//     values as they lie;
//   - a window by offset is one unaligned load per key, from a vector made once per head;
//   - softmax and entmax need no sum across lanes, and sums along diagonals are aligned additions.
//
// From top to bottom: numbers, vectors and products (`Lanes`), products in tiles (`Tiles`); how far
// a head sees (`Problem`); the thresholds of entmax (`Solver`); numbers that are not finite
// (`Guard`); what one head adds by offset (`Head`); the keys of a text (`Keys`); some queries and
// the keys they see (`Block`), and what becomes of them (`Softmax`, `Entmax`); the newest query of
// every head (`Newest`); who does what (`Worker`); the interface.
//
// The file is compiled once for each instruction set; the width of a vector follows from the
// compiler's flags. It trusts its caller: shapes, strides and dtypes are checked in Python, in one
// place.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <utility>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__)
#include <cpuid.h>
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__linux__)
#define AMX                                // Clang up to 14 has the second name
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

typedef int64_t Int;

#if defined(__AVX512F__)
enum { VECTOR = 64 };  // bytes
#elif defined(__AVX2__)
enum { VECTOR = 32 };
#else
enum { VECTOR = 16 };
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda
#define NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// ---- what the caller hands over -----------------------------------------------------------------

enum Kind { F32, F64, BF16, F16 };

struct Rows {          // a tensor [B,H,N,d]
    char *data;
    Int b, h, n, e;    // strides, in numbers
};

struct PerHead {       // a tensor [B|1,H|1,...]
    const void *data;  // of `real`; null where there is none
    Int b, h;          // strides, in numbers
};

typedef void Team(void (*function)(void *), void *data, unsigned threads, unsigned flags);

// A record that Python fills: a struct, and the text of its members. Python has its own table of
// fields, and loads no library whose text differs.
#define RECORD(name, ...) struct name { __VA_ARGS__ }; const char members_of_##name[] = #__VA_ARGS__

RECORD(Call,
    double scale, softcap, dropout_p, T, p; // `Plan` of chapter 20, in its order
    Int left, right, q_offset, n_global, table_first, is_causal, return_lse, after, fraction;
    Rows q, k, v, out;
    PerHead sigma, table, alpha, rel_bias, sink;
    void *kept;                 // softmax: [B,H,N,dv] `real`, the output unrounded, or null where
                                // `out` is; entmax: [B,H,N,KEPT] bytes, bits of the live keys of
                                // each block
    void *lse;                  // [B,H,N] `real`: log of the row's sum, or threshold; inf: no key,
                                // nan: lost; or null
    void *weights;              // [B,H,N,columns] `real`, zeros: leading keys, those from
                                // `first_key` on; or null
    const uint8_t *keep;        // [B,M], 0 where a key takes no part; or null
    const Int *texts, *text_of; // [T][5] a text's first and end query, first and end key, and
                                // shift; [B+1] its row's
    const Int *heads;           // [B*Hkv][3] addresses of keys and values, position of row 0: of a
                                // cache
    const Int *origins;         // [B] position of the first leading token: of a cache
    Team *team;                 // calls a function on several threads, as OpenMP's
                                // `GOMP_parallel`; or null
    Int B, H, Hkv, N, M, d, dv, kind;      // the kind of q, k, v and out
    Int first_key, columns;                // of `weights`
    Int table_size, bias_reach;            // the table's offsets j - i: table_first and on; R of a
                                           // bias of 2R + 1 numbers
    Int seed, threads;
);

RECORD(Grads,
    Rows dout, dq, dk, dv;      // dk and dv: `real`, contiguous rows of whole vectors
    void *dsigma, *dtable, *dalpha, *drel_bias, *dsink; // [B,H,...] `real`, or null
    const void *dlse;           // [B,H,N] `real`, what comes back to `lse`; or null
);

namespace {

// ---- numbers ------------------------------------------------------------------------------------

template <class real> struct Constants;
template <> struct Constants<float> {
    typedef int32_t integer;
    static constexpr int MANTISSA = 23;
    static constexpr int EXP_TERMS = 6, SERIES = 4, PSI_TERMS = 9, EXPM1_TERMS = 8;
    static constexpr float magic = 12582912.f, lowest = -125.f, highest = 126.f;
    static constexpr float converged = 2e-7f;
    static constexpr integer half_root = 0x3f3504f3;  // sqrt(1/2)
    // 2^r on [-1/2, 1/2], relative error 2^-24
    static constexpr float exp2[] = {
        1.f, .6931471825f, .2402264476f, .5550347269e-1f, .9618384764e-2f, .1339262701e-2f,
        .1535920892e-3f };
};
template <> struct Constants<double> {
    typedef int64_t integer;
    static constexpr int MANTISSA = 52;
    static constexpr int EXP_TERMS = 13, SERIES = 11, PSI_TERMS = 16, EXPM1_TERMS = 15;
    static constexpr double magic = 6755399441055744., lowest = -1021., highest = 1022.;
    static constexpr double converged = 1e-15;
    static constexpr integer half_root = 0x3fe6a09e667f3bcd;
    static constexpr double exp2[] = {
        1., 6.931471805599453e-1, 2.402265069591007e-1, 5.550410866482158e-2,
        9.618129107628477e-3, 1.333355814642844e-3, 1.540353039338161e-4, 1.525273380405984e-5,
        1.321548679014431e-6, 1.017808600923970e-7, 7.054911620801123e-9, 4.445538271870811e-10,
        2.567843599348820e-11, 1.369148885390413e-12 };
};

constexpr double inverse_factorial(int k) { return k < 2 ? 1. : inverse_factorial(k-1)/k; }

// The same bits as another type.
template <class To, class From> To bits(From x) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

float from_bf16(uint16_t x) { return bits<float>((uint32_t)x << 16); }
uint16_t to_bf16(float f) {
    if (f != f) return 0x7fc0;
    uint32_t u = bits<uint32_t>(f);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
float from_f16(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    const uint32_t rest = (uint32_t)(x & 0x7fff) << 13;
    if (rest >= 0x0f800000) return bits<float>(sign | 0x7f800000 | rest);  // inf, nan
    return bits<float>(sign | bits<uint32_t>(bits<float>(rest)*0x1p112f));
}
uint16_t to_f16(float f) {
    const uint32_t u = bits<uint32_t>(f), sign = u >> 16 & 0x8000;
    uint32_t size = u & 0x7fffffff;
    if (size > 0x7f800000) size = 0x7e00;                        // nan
    else if (size >= 0x477ff000) size = 0x7c00;                  // from 65,520 on: inf
    else if (size < 0x38800000)                                  // subnormal: the sum rounds
        size = bits<uint32_t>(bits<float>(size)+.5f) - 0x3f000000;
    else size = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    return (uint16_t)(sign | size);
}

// The random number of a pair of query and key, from the call's seed: dropout is the same whoever
// computes it.
uint32_t mixed(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}
uint32_t row_seed(Int seed, Int head, Int query) {
    uint32_t x = mixed((uint32_t)seed + 0x9e3779b9u);
    x = mixed(x ^ (uint32_t)((uint64_t)seed >> 32));
    x = mixed(x + (uint32_t)head*0x85ebca6bu);
    return mixed(x + (uint32_t)query*0xc2b2ae35u);
}
uint32_t pair_bits(uint32_t row, Int key) { return mixed(row + (uint32_t)key*0x9e3779b1u) >> 8; }

Int rounded(Int n, Int to) { return (n > 0 ? n+to-1 : n)/to*to; }  // up

// Fetches memory that is read soon; it need not be there.
INLINE void fetch(const void *x, Int bytes) {
    for (Int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)x+i);
}

// ---- one row of queries -------------------------------------------------------------------------

// Keys of a run; bytes per row for bits of live keys; queries of a block. Back through a softmax,
// each block reads and writes the gradients of its keys: with wide vectors, taller blocks pay. In
// tiles, sums over a run are read and written once.
#if defined(AMX)
enum { KEYS = 192 };
#else
enum { KEYS = 96 };
#endif
enum { KEPT = 64, SHORT = 16, TALL = VECTOR >= 32 ? 32 : 16 };

// Numbers p[i*row + j*col]; where columns lie side by side, `col` is left out.
template <class number> struct Matrix {
    number *p;
    Int row, col = 1;
    Matrix below(Int i) const { return {p+i*row, row, col}; }  // from row i on
    Matrix right(Int j) const { return {p+j*col, row, col}; }  // from column j on
};

template <class real, int QUERIES> struct Lanes {
    typedef Constants<real> C;
    typedef typename C::integer integer;
    typedef real vec __attribute__((vector_size(VECTOR)));
    typedef integer ivec __attribute__((vector_size(VECTOR)));
    typedef real in_memory __attribute__((vector_size(VECTOR), aligned(sizeof(real))));
    static constexpr int LANES = VECTOR/sizeof(real), GROUPS = QUERIES/LANES, BLOCK = QUERIES;

    static INLINE vec load(const real *p) { return *(const in_memory*)p; }
    static INLINE ivec wide(const uint16_t *p) {   // each number in a lane
        typedef uint16_t half __attribute__((vector_size(2*LANES), aligned(2)));
#if defined(__AVX512F__)
        if constexpr (LANES == 16) return (ivec)_mm512_cvtepu16_epi32(*(const __m256i_u*)p);
#endif
        return __builtin_convertvector(*(const half*)p, ivec);
    }
    static INLINE vec load(const uint16_t *p) { return (vec)(wide(p) << 16); }  // bfloat16
    // Two vectors of a row. Of bfloat16, the first has the numbers in even places, which takes half
    // of the instructions; what meets them lies in that order (`deal`).
    static INLINE void load_two(const real *p, vec &a, vec &b) {
        a = load(p);
        b = load(p+LANES);
    }
    static INLINE void load_two(const uint16_t *p, vec &a, vec &b) {
        ivec both;
        memcpy(&both, p, sizeof both);
        a = (vec)(both << 16);
        b = (vec)(both >> 16 << 16);
    }
    static void deal(real *to, const real *from, Int width) {
        for (Int e = 0; e+2*LANES <= width; e += 2*LANES) for (int l = 0; l < LANES; l++) {
            to[e+l] = from[e+2*l];
            to[e+LANES+l] = from[e+2*l+1];
        }
        for (Int e = width/(2*LANES)*2*LANES; e < width; e++) to[e] = from[e];
    }
    static void gather(real *x, Int width) {       // back
        real dealt[2*LANES];
        for (; width >= 2*LANES; width -= 2*LANES, x += 2*LANES) {
            memcpy(dealt, x, sizeof dealt);
            for (int l = 0; l < LANES; l++) {
                x[2*l] = dealt[l];
                x[2*l+1] = dealt[LANES+l];
            }
        }
    }
    static INLINE void store(real *p, vec x) { *(in_memory*)p = x; }
    static INLINE vec splat(real x) { return x - vec{}; }
    static INLINE vec max(vec a, vec b) { return a > b ? a : b; }
    static INLINE vec min(vec a, vec b) { return a < b ? a : b; }
    static INLINE bool any(ivec x) {  // whether a comparison holds in some lane
#if defined(__AVX512F__)
        return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif defined(__AVX2__)
        return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
        int64_t half[2];
        memcpy(half, &x, sizeof half);
        return half[0] | half[1];
#endif
    }
    static INLINE vec sqrt(vec x) {
        UNROLL for (int l = 0; l < LANES; l++) x[l] = std::sqrt(x[l]);
        return x;
    }
    static INLINE real total(vec x) {
        real sum = 0;
        for (int l = 0; l < LANES; l++) sum += x[l];
        return sum;
    }

    static INLINE real dot(const real *x, const real *y, Int n) {
        vec sum{};
        Int e = 0;
        for (; e+LANES <= n; e += LANES) sum += load(x+e)*load(y+e);
        real s = total(sum);
        for (; e < n; e++) s += x[e]*y[e];
        return s;
    }

    // 2^x, exactly 0 up to 2^lowest; `x` is at most 0, or `bounded` from above here
    template <bool bounded = false> static INLINE vec exp2(vec x) {
        ivec keep = x > splat(C::lowest);
        x = keep ? x : splat(C::lowest);
        if (bounded) x = min(x, splat(C::highest));
        vec t = x + C::magic, r = x - (t - C::magic), p = splat(C::exp2[C::EXP_TERMS]);
        UNROLL for (int k = C::EXP_TERMS-1; k >= 0; k--) p = p*r + C::exp2[k];
        return (vec)(((ivec)p + ((ivec)t << C::MANTISSA)) & keep);
    }
    // log w, where t is w - 1: for w near 1 the fraction f is t itself, so log1p(t) is right for
    // small t too
    static INLINE vec log_of(vec w, vec t) {
        vec f;
        ivec e = ((ivec)w - C::half_root) >> C::MANTISSA;
        f = (vec)((ivec)w - (e << C::MANTISSA)) - 1;
        f = e == 0 ? t : f;
        vec u = f/(f + 2), u2 = u*u, p = splat(real(1)/(2*C::SERIES+1));
        UNROLL for (int k = C::SERIES-1; k >= 0; k--) p = p*u2 + real(1)/(2*k+1);
        return 2*u*p + __builtin_convertvector(e, vec)*real(M_LN2);
    }
    static INLINE vec log(vec x) { return log_of(x, x-1); }
    static INLINE vec log1p(vec t) { return log_of(t+1, t); }
    static INLINE vec expm1(vec x) {
        vec near = splat(inverse_factorial(C::EXPM1_TERMS));
        UNROLL for (int k = C::EXPM1_TERMS-1; k >= 1; k--)
            near = near*x + real(inverse_factorial(k));
        vec far = exp2<true>(x*real(M_LOG2E)) - 1;
        return ((x < real(.5)) & (x > real(-.5))) ? near*x : far;
    }
    static INLINE vec tanh(vec x) {
        vec size = min(x < 0 ? -x : x, splat(20)), e = expm1(2*size), t = e/(e + 2);
        t = x < 0 ? -t : t;
        return x == x ? t : x;        // NaN stays
    }

    // rows and lanes of a square exchanged
    template <int s, size_t... l>
    static INLINE void exchange(vec *r, std::index_sequence<l...>, int rows = LANES) {
        UNROLL for (int i = 0; i < rows; i++) if (!(i & s)) {
            vec a = r[i], b = r[i+s];
            r[i] = __builtin_shufflevector(a, b, ((int)l & s ? (int)l - s + LANES : (int)l)...);
            r[i+s] = __builtin_shufflevector(a, b, ((int)l & s ? (int)l + LANES : (int)l + s)...);
        }
    }
    static INLINE void transpose(vec *r) {
        auto all = std::make_index_sequence<LANES>();
        if (LANES > 8) exchange<(LANES > 8 ? 8 : 1)>(r, all);
        if (LANES > 4) exchange<(LANES > 4 ? 4 : 1)>(r, all);
        if (LANES > 2) exchange<(LANES > 2 ? 2 : 1)>(r, all);
        exchange<1>(r, all);
    }
    // rows [QUERIES][width] times `by`, as columns [width][QUERIES]
    static void turn(real *columns, const real *rows, Int width, real by) {
        for (Int i = 0; i < QUERIES; i += LANES) for (Int e = 0; e < width; e += LANES) {
            vec r[LANES];
            UNROLL for (int l = 0; l < LANES; l++) r[l] = load(rows+(i+l)*width+e)*by;
            transpose(r);
            UNROLL for (int l = 0; l < LANES; l++) store(columns+(e+l)*QUERIES+i, r[l]);
        }
    }

    // ---- products -------------------------------------------------------------------------------

    typedef Matrix<real> Out;
    typedef Matrix<const real> In;

    // R rows of C, each of V vectors, stay in registers while k runs; what is there is added at the
    // end, so a sum over runs rounds as a sum of sums does
    template <int R, int V> static void micro(Out c, In a, In b, Int depth, bool add) {
        vec x[R][V] = {};
        for (Int k = 0; k < depth; k++, a.p += a.col, b.p += b.row) {
            vec y[V];
            UNROLL for (int v = 0; v < V; v++) y[v] = load(b.p+v*LANES);
            UNROLL for (int r = 0; r < R; r++) {
                vec z = splat(a.p[r*a.row]);
                UNROLL for (int v = 0; v < V; v++) x[r][v] += z*y[v];
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) {
            real *to = c.p+r*c.row+v*LANES;
            store(to, add ? load(to)+x[r][v] : x[r][v]);
        }
    }
    // V vectors of each row
    template <int R, int V> static INLINE void panel(Out c, In a, In b, Int rows, Int depth,
                                                     bool add) {
        Int r = 0;
        for (; r+R == rows || r+R+4 <= rows; r += R)
            micro<R,V>(c.below(r), a.below(r), b, depth, add);
        for (; r+4 <= rows; r += 4) micro<4,V>(c.below(r), a.below(r), b, depth, add);
        for (; r < rows; r++) micro<1,V>(c.below(r), a.below(r), b, depth, add);
    }
    // C[rows][cols] (+)= A[rows][depth] B[depth][cols]; cols is a multiple of LANES, rows of B and
    // C are contiguous. A part of its caller, where most strides are constants.
    static INLINE void product(Out c, In a, In b, Int rows, Int cols, Int depth, bool add) {
        Int x = 0;
#if defined(__x86_64__) && !defined(__AVX512F__)  // 16 registers; others have 32
        if (rows == 1 && cols%(8*LANES) == 0) {   // rows of B as they lie in memory
            for (; x < cols; x += 8*LANES) micro<1,8>(c.right(x), a, b.right(x), depth, add);
            return;
        }
        for (; x+2*LANES <= cols; x += 2*LANES)
            panel<6,2>(c.right(x), a, b.right(x), rows, depth, add);
        for (; x < cols; x += LANES)
            panel<12,1>(c.right(x), a, b.right(x), rows, depth, add);
#else
        for (; x+4*LANES <= cols; x += 4*LANES)
            panel<6,4>(c.right(x), a, b.right(x), rows, depth, add);
        for (; x+2*LANES <= cols; x += 2*LANES)
            panel<12,2>(c.right(x), a, b.right(x), rows, depth, add);
        for (; x < cols; x += LANES)
            panel<8,1>(c.right(x), a, b.right(x), rows, depth, add);
#endif
    }
    // The same as a function of its own, for the backward pass: it has several products in one
    // loop, where they would have too few registers.
    static NOINLINE void product_apart(Out c, In a, In b, Int rows, Int cols, Int depth, bool add) {
        product(c, a, b, rows, cols, depth, add);
    }
    // Sums of LANES vectors, one in each lane.
    static INLINE vec totals(vec *r) {
        auto all = std::make_index_sequence<LANES>();
        if (LANES > 8) fold<(LANES > 8 ? 8 : 1)>(r, all);
        if (LANES > 4) fold<(LANES > 4 ? 4 : 1)>(r, all);
        if (LANES > 2) fold<(LANES > 2 ? 2 : 1)>(r, all);
        fold<1>(r, all);
        return r[0];
    }
    template <int s, size_t... l> static INLINE void fold(vec *r, std::index_sequence<l...> all) {
        exchange<s>(r, all, 2*s);
        UNROLL for (int i = 0; i < s; i++) r[i] += r[i+s];
    }
    // Products of R queries with keys, up to LANES of them: s[query] has one in each lane. The
    // width lies in the lanes, and what is read of a key serves all queries.
    enum { SHARING = VECTOR == 64 ? 4 : 2 };       // as many queries at most
    template <int R, class Rows>
    static INLINE void key_products(vec *s, Rows k, Int keys, const real *const *q, Int width) {
        enum { SOME = LANES < 4 ? LANES : 4 };     // keys at once: sums do not wait for each other
        vec r[R][LANES];
        for (int l0 = 0; l0 < LANES; l0 += SOME) {
            vec sum[R][SOME] = {};
            auto row = [&](int l) { return k.p+std::min(Int(l0+l), keys-1)*k.row; };
            Int e = 0;
            for (; e+2*LANES <= width; e += 2*LANES) UNROLL for (int l = 0; l < SOME; l++) {
                vec a, b;
                load_two(row(l)+e, a, b);
                __builtin_prefetch(row(l)+LANES*k.row+e);
                UNROLL for (int i = 0; i < R; i++)
                    sum[i][l] = sum[i][l]+load(q[i]+e)*a+load(q[i]+e+LANES)*b;
            }
            for (; e < width; e += LANES) UNROLL for (int l = 0; l < SOME; l++) {
                const vec a = load(row(l)+e);
                UNROLL for (int i = 0; i < R; i++) sum[i][l] += load(q[i]+e)*a;
            }
            UNROLL for (int i = 0; i < R; i++) UNROLL for (int l = 0; l < SOME; l++)
                r[i][l0+l] = sum[i][l];
        }
        UNROLL for (int i = 0; i < R; i++) s[i] = totals(r[i]);
    }
    // S[key][query] for one or a few queries.
    template <class Rows>
    static void few_scores(real *s, Rows k, const real *q, Int keys, Int queries, Int width) {
        for (Int i = 0; i < queries; i++, q += width) for (Int j = 0; j < keys; j += LANES) {
            vec x;
            key_products<1>(&x, k.below(j), keys-j, &q, width);
            for (Int l = 0; l < std::min<Int>(LANES, keys-j); l++) s[(j+l)*QUERIES+i] = x[l];
        }
    }
    // O[query] (+)= sum of weights S[key][query] times rows, for one or a few queries
    template <class Rows>
    static void few_sums(real *o, const real *s, Rows v, Int keys, Int queries, Int width,
                         bool add) {
        for (Int i = 0; i < queries; i++, o += width, s++)
            sums_of<1,QUERIES>(&o, &s, v, keys, width, add);
    }
    // The same for R queries, each with rows of its own, and weights STEP numbers apart: what is
    // read of a value serves all queries.
    template <int R, int STEP, class Rows>
    static void sums_of(real *const *o, const real *const *s, Rows v, Int keys, Int width,
                        bool add) {
        Int e = 0;
        for (; e+4*LANES <= width; e += 4*LANES) sums_at<R,STEP,4>(o, s, v, keys, e, add);
        if (e+2*LANES <= width) sums_at<R,STEP,2>(o, s, v, keys, e, add), e += 2*LANES;
        if (e < width) sums_at<R,STEP,1>(o, s, v, keys, e, add);
    }
    template <int R, int STEP, int V, class Rows>
    static INLINE void sums_at(real *const *o, const real *const *s, Rows v, Int keys, Int e,
                               bool add) {
        vec sum[R][V] = {};
        for (Int j = 0; j < keys; j++) {
            vec y[V];
            const auto *row = v.p+j*v.row+e;
            fetch(row+8*v.row, V*LANES*sizeof *row);
            UNROLL for (int x = 0; x+1 < V; x += 2) load_two(row+x*LANES, y[x], y[x+1]);
            if (V%2) y[V-1] = load(row+(V-1)*LANES);
            UNROLL for (int i = 0; i < R; i++) {
                const vec w = splat(s[i][j*STEP]);
                UNROLL for (int x = 0; x < V; x++) sum[i][x] += w*y[x];
            }
        }
        UNROLL for (int i = 0; i < R; i++) UNROLL for (int x = 0; x < V; x++) {
            real *to = o[i]+e+x*LANES;
            store(to, add ? load(to)+sum[i][x] : sum[i][x]);
        }
    }
    // the largest |x|; infinity where a number is not finite. Without their signs, numbers lie as
    // their bits do, NaN on top
    static real largest(In x, Int rows, Int cols) {
        constexpr integer size = std::numeric_limits<integer>::max();
        constexpr real infinity = std::numeric_limits<real>::infinity();
        ivec most{};
        for (Int r = 0; r < rows; r++) for (Int e = 0; e < cols; e += LANES) {
            ivec y = (ivec)load(x.p+r*x.row+e) & size;
            most = y > most ? y : most;
        }
        integer high = 0;
        for (int l = 0; l < LANES; l++) high = std::max(high, most[l]);
        return high < bits<integer>(infinity) ? bits<real>(high) : infinity;
    }
    static real largest(Matrix<const uint16_t> x, Int rows, Int cols) {    // of bfloat16
        int16_t most = 0;
        for (Int r = 0; r < rows; r++) for (Int e = 0; e < cols; e++)
            most = std::max<int16_t>(most, x.p[r*x.row+e] & 0x7fff);
        return most < 0x7f80 ? from_bf16(most) : INFINITY;
    }
};

// ---- tiles: products of bfloat16 numbers --------------------------------------------------------

// Processors with AMX multiply sixteen rows of 32 bfloat16 numbers at once, and add up in float32:
// products of such numbers are exact. Those with AVX512_BF16 alone multiply a vector of pairs, in
// the same places. Everything is as above but for B, whose rows lie in pairs: B[k][column] and
// B[k+1][column] side by side. There are none elsewhere, nor for float64.
template <class real, int QUERIES> struct Tiles {
    static constexpr bool exist = false;
    static constexpr bool may_use = false;
    static constexpr bool pay(Int) { return false; }
    struct Sizes { explicit Sizes(bool) {} };
};

#if defined(__AVX512BF16__)
// Whether the processor has them, and the system saves tiles when it changes threads.
const bool has_tiles = [] {
    unsigned a, b, c, d, bfloat16;
    if (!__get_cpuid_count(7, 1, &bfloat16, &b, &c, &d)) return false;
    if (!(bfloat16 >> 5 & 1)) return false;
#if defined(AMX)
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    enum { ASK = 0x1023, TILE_DATA = 18 };
    return (d >> 22 & 1) && (d >> 24 & 1) && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    return true;
#endif
}();

template <int QUERIES> struct Tiles<float, QUERIES> : Lanes<float, QUERIES> {
    typedef Lanes<float, QUERIES> L;
    using typename L::vec; using typename L::ivec; using typename L::Out;
    using L::LANES; using L::load; using L::store; using L::wide;
    typedef Matrix<const uint16_t> In;     // B: of pairs, so half as many rows of twice the length
    static constexpr bool exist = true;
    static inline const bool &may_use = has_tiles;
    enum { ROWS = 16, DEPTH = 32 };        // of a tile of A; C has ROWS columns

#if defined(AMX)
    static bool pay(Int) { return may_use; }               // for so many queries
    // While it lives, this thread's tiles have their largest size, where they are used.
    struct Sizes {
        const bool used;
        explicit Sizes(bool used) : used(used) {
            if (!used) return;
            struct alignas(64) {
                uint8_t palette, start, none[14];
                uint16_t row_bytes[16];
                uint8_t rows[16];
            } all = {};
            all.palette = 1;
            for (int t = 0; t < 8; t++) all.row_bytes[t] = 64, all.rows[t] = ROWS;
            asm volatile("ldtilecfg %0" :: "m"(all));
        }
        ~Sizes() { if (used) asm volatile("tilerelease"); }
    };
    template <int T> static INLINE void clear() { asm volatile("tilezero %%tmm%c0" :: "i"(T)); }
    template <int T> static INLINE void read(const void *p, Int bytes) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" :: "r"(p), "r"(bytes), "i"(T) : "memory");
    }
    template <int T> static INLINE void write(void *p, Int bytes) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" :: "r"(p), "r"(bytes), "i"(T) : "memory");
    }
    template <int C, int A, int B> static INLINE void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" :: "i"(C), "i"(A), "i"(B));
    }

    // `work` for 0..n-1, each a constant of the compiler: an instruction names its tiles
    template <int n, class F> static INLINE void each(F &&work) {
        if constexpr (n > 1) each<n-1>(work);
        work(std::integral_constant<int, n-1>());
    }
    // R by V tiles of C stay in registers while k runs; A has one tile, B has V
    template <int R, int V> static void micro(Out c, In a, In b, Int depth, bool add) {
        constexpr int A = R*V, B = A+1;
        auto place = [&](int t) { return c.p+t/V*ROWS*c.row+t%V*ROWS; };
        each<R*V>([&](auto t) INLINED {
            if (add) read<t>(place(t), c.row*sizeof(float));
            else clear<t>();
        });
        for (Int k = 0; k < depth; k += DEPTH) {
            each<V>([&](auto v) INLINED {
                read<B+v>(b.p+k/2*b.row+2*v*ROWS, b.row*sizeof(uint16_t));
            });
            each<R>([&](auto r) INLINED {
                read<A>(a.p+r*ROWS*a.row+k, a.row*sizeof(uint16_t));
                each<V>([&](auto v) INLINED { multiply_add<r*V+v, A, B+v>(); });
            });
        }
        each<R*V>([&](auto t) INLINED { write<t>(place(t), c.row*sizeof(float)); });
    }
    template <int R, int V> static void panel(Out c, In a, In b, Int rows, Int depth, bool add) {
        Int r = 0;
        for (; r+R*ROWS <= rows; r += R*ROWS)
            micro<R,V>(c.below(r), a.below(r), b, depth, add);
        for (; R > 2 && r+2*ROWS <= rows; r += 2*ROWS)
            micro<2,V>(c.below(r), a.below(r), b, depth, add);
        for (; r < rows; r += ROWS) micro<1,V>(c.below(r), a.below(r), b, depth, add);
    }
    // C[rows][cols] (+)= A[rows][depth] B[depth][cols]; rows and cols are whole tiles, and depth is
    static void product(Out c, In a, In b, Int rows, Int cols, Int depth, bool add) {
        Int x = 0;
        for (; x+2*ROWS <= cols; x += 2*ROWS)
            panel<2,2>(c.right(x), a, b.right(2*x), rows, depth, add);
        for (; x < cols; x += ROWS) panel<4,1>(c.right(x), a, b.right(2*x), rows, depth, add);
    }
#else
    static bool pay(Int queries) { return may_use && queries > SHORT; }
    struct Sizes { explicit Sizes(bool) {} };
    // R rows and V vectors of C stay in registers while k runs, two at a time
    template <int R, int V> static INLINE void of_pairs(Out c, In a, In b, Int depth, bool add) {
        __m512 sum[R][V];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
            sum[r][v] = add ? _mm512_loadu_ps(c.p+r*c.row+v*LANES) : _mm512_setzero_ps();
        for (Int k = 0; k < depth; k += 2) {
            __m512bh columns[V];
            UNROLL for (int v = 0; v < V; v++)
                columns[v] = (__m512bh)_mm512_loadu_si512(b.p+k/2*b.row+2*v*LANES);
            UNROLL for (int r = 0; r < R; r++) {
                int32_t pair;
                memcpy(&pair, a.p+r*a.row+k, sizeof pair);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                UNROLL for (int v = 0; v < V; v++)
                    sum[r][v] = _mm512_dpbf16_ps(sum[r][v], both, columns[v]);
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
            _mm512_storeu_ps(c.p+r*c.row+v*LANES, sum[r][v]);
    }
    static void product(Out c, In a, In b, Int rows, Int cols, Int depth, bool add) {
        Int x = 0;
        for (; x+2*ROWS <= cols; x += 2*ROWS) for (Int r = 0; r < rows; r += 8)
            of_pairs<8,2>(c.right(x).below(r), a.below(r), b.right(2*x), depth, add);
        for (; x < cols; x += ROWS) for (Int r = 0; r < rows; r += 16)
            of_pairs<16,1>(c.right(x).below(r), a.below(r), b.right(2*x), depth, add);
    }
#endif

    typedef uint16_t words __attribute__((vector_size(64)));
    // two vectors in bfloat16: all numbers of the first, then all of the second
    static INLINE words two_as_bf16(vec first, vec second) {
        return (words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
    static INLINE void as_bf16(uint16_t *to, vec first, vec second) {
        words both = two_as_bf16(first, second);
        memcpy(to, &both, sizeof both);
    }
    // 32 numbers of each of 16 rows become 16 pairs of rows, each [16][2]
    static INLINE void turn_pairs(vec *r, uint16_t *pairs, Int row) {
        L::transpose(r);
        UNROLL for (int l = 0; l < LANES; l++) store((float*)(pairs+l*row), r[l]);
    }
    // rows [QUERIES][width], as pairs of columns [width/2][QUERIES][2]; zeros up to a whole DEPTH;
    // times a power of two
    static void columns(uint16_t *pairs, const float *rows, Int width, float by) {
        for (Int i = 0; i < QUERIES; i += LANES) for (Int e = 0; e < width; e += DEPTH) {
            vec r[LANES];
            UNROLL for (int l = 0; l < LANES; l++) {
                const float *x = rows+(i+l)*width+e;
                const vec second = e+LANES < width ? load(x+LANES) : vec{};
                r[l] = (vec)two_as_bf16(load(x)*by, second*by);
            }
            turn_pairs(r, pairs+e/2*2*QUERIES+2*i, 2*QUERIES);
        }
    }
    // rows [n][width], as pairs of rows [n/2][width][2]; n is even, width whole vectors
    static void pairs(uint16_t *to, const float *rows, Int n, Int width) {
        for (Int j = 0; j < n; j += 2) for (Int i = 0; i < width; i += LANES) {
            const float *x = rows+j*width+i;
            const words two = two_as_bf16(load(x), load(x+width));
            const words paired = __builtin_shufflevector(two, two, 0, 16, 1, 17, 2, 18, 3, 19,
                4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                15, 31);
            memcpy(to+j*width+2*i, &paired, sizeof paired);
        }
    }
    // what bfloat16 leaves of n numbers
    static void rests(float *x, Int n) {
        for (Int e = 0; e < n; e += LANES) {
            uint16_t near[DEPTH];
            as_bf16(near, load(x+e), vec{});
            store(x+e, load(x+e)-load(near));
        }
    }
    // n numbers in bfloat16; whole DEPTHs
    static void as_bf16(uint16_t *to, const float *from, Int n) {
        for (Int e = 0; e < n; e += DEPTH) as_bf16(to+e, load(from+e), load(from+e+LANES));
    }
    // 32 rows of `width` numbers, whole sixteens, become `width` rows of 32
    static void across(uint16_t *to, Int to_row, const uint16_t *const *rows, Int width) {
        for (Int e = 0; e < width; e += LANES) {
            vec r[LANES];
            UNROLL for (int l = 0; l < LANES; l++) {
                const ivec first = wide(rows[2*l]+e), second = wide(rows[2*l+1]+e);
                r[l] = (vec)(first | second << 16);
            }
            turn_pairs(r, to+e*to_row, to_row);
        }
    }
    // rows back: columns [width][QUERIES] as rows [QUERIES][width]
    static void turn_back(float *rows, const float *columns, Int width) {
        for (Int i = 0; i < QUERIES; i += LANES) for (Int e = 0; e < width; e += LANES) {
            vec r[LANES];
            UNROLL for (int l = 0; l < LANES; l++) r[l] = load(columns+(e+l)*QUERIES+i);
            L::transpose(r);
            UNROLL for (int l = 0; l < LANES; l++) store(rows+(i+l)*width+e, r[l]);
        }
    }
};
#endif

// ---- reading and writing rows of any dtype ------------------------------------------------------

Int bytes_of(Int kind) { return kind == F64 ? 8 : kind == F32 ? 4 : 2; }
template <class real> bool is_of(Int kind) { return kind == (sizeof(real) == 4 ? F32 : F64); }

template <class real> void read_row(real *to, const char *from, Int n, Int step, Int kind) {
    const uint16_t *x = (const uint16_t*)from;
    if (step == 1 && is_of<real>(kind)) memcpy(to, from, n*sizeof(real));
    else if (kind == F32) for (Int e = 0; e < n; e++) to[e] = (real)((const float*)from)[e*step];
    else if (kind == F64) for (Int e = 0; e < n; e++) to[e] = (real)((const double*)from)[e*step];
    else if (kind == BF16) for (Int e = 0; e < n; e++) to[e] = from_bf16(x[e*step]);
    else for (Int e = 0; e < n; e++) to[e] = from_f16(x[e*step]);
}
template <class real> void write_row(char *to, const real *from, Int n, Int kind) {
    uint16_t *x = (uint16_t*)to;
    if (kind <= F64) memcpy(to, from, n*sizeof(real));
    else if (kind == BF16) for (Int e = 0; e < n; e++) x[e] = to_bf16((float)from[e]);
    else for (Int e = 0; e < n; e++) x[e] = to_f16((float)from[e]);
}

// ---- which keys a head sees ---------------------------------------------------------------------

// Offsets j - p from -left to right, p the position of the query: those of the M keys only, so one
// side is negative where all keys stand on the other. At least -1 together, where no key is seen.
struct Reach { Int left, right; };

// Rows q0..q1-1 that attend to keys k0..k1-1; `origin` is position 0 of n_global. Row i stands at
// i + shift on the axis of the keys.
struct Text { Int q0, q1, k0, k1, origin, shift; };

// What a task adds up for one head, in a row of numbers; the names are those of the fields that
// learn.
struct Sums {
    double *p;
    Int table_size;
    enum { SIGMA, ALPHA, SINK, TABLE };    // places in the row; the bias stands behind the table
    static Int numbers(Int table_size, Int bias_size) { return TABLE+table_size+bias_size; }
    double *sigma() const { return p+SIGMA; }
    double *alpha() const { return p+ALPHA; }
    double *sink() const { return p+SINK; }
    double *table() const { return p+TABLE; }
    double *rel_bias() const { return table()+table_size; }
};

// A call, and what follows from it for all tasks.
template <class real> struct Problem {
    static constexpr int LANES = VECTOR/sizeof(real);
    const Call &c;
    Int share;                             // query heads of a key head
    Int width, dv_width;                   // d and dv in whole vectors
    Int depth, dv_depth;                   // and in whole tiles
    Int lead;                              // leading keys that there are
    bool has_factors;                      // weights are multiplied: a window after, dropout
    double level, steepness, norm, rate;   // of the default window, see `Head::curve`
    std::vector<Reach> reaches;            // [B,H]
    Int reach_most;                        // left + right of the widest

    explicit Problem(const Call &call)
        : c(call),
          share(c.H/std::max<Int>(c.Hkv, 1)),
          width(rounded(c.d, LANES)),
          dv_width(rounded(c.dv, LANES)),
          depth(rounded(c.d, 32)),
          dv_depth(rounded(c.dv, 32)),
          lead(std::min(c.n_global, c.M)),
          has_factors(c.after || c.dropout_p > 0),
          level(-std::log(c.T)),
          steepness(c.p*c.T/(1-c.T)),
          norm(1/std::tanh(c.p)),
          rate(std::sqrt(2*level)*(c.fraction ? std::max<Int>(c.M, 1)/2. : 1)),
          reaches(c.B*c.H),
          reach_most(0) {
        for (Int b = 0; b < c.B; b++) for (Int h = 0; h < c.H; h++) {
            const Reach r = reach_of(b, h);
            reaches[b*c.H+h] = r;
            reach_most = std::max(reach_most, r.left+r.right);
        }
    }
    // Row i of a head of a tensor [B,H,N,d], and the numbers of a head of a tensor [B|1,H|1,...].
    char *place(const Rows &x, Int b, Int h, Int i) const {
        return x.data+(b*x.b+h*x.h+i*x.n)*bytes_of(c.kind);
    }
    const real *row(const PerHead &x, Int b, Int h) const {
        return x.data ? (const real*)x.data + b*x.b + h*x.h : nullptr;
    }
    Reach reach_of(Int b, Int h) const {
        const Reach window = within_window(b, h), most = occurring(b);
        const Int left = std::min(window.left, most.left);
        const Int right = std::min(window.right, most.right);
        return {left, std::max(right, -left-1)};
    }
    // How far the queries of a row can look in their texts; nowhere, if there are none.
    Reach occurring(Int b) const {
        if (!c.texts) return {c.N-1+c.q_offset, c.M-1-c.q_offset};
        Reach most = {-1, 0};
        for (Int t = 0; t < texts(b); t++) {
            const Text x = whole_text(b, t);
            const Int left = x.q1-1+x.shift-x.k0, right = x.k1-1-x.q0-x.shift;
            if (t == 0) most = {left, right};
            else most = {std::max(most.left, left), std::max(most.right, right)};
        }
        return most;
    }
    Reach within_window(Int b, Int h) const {
        const Int far = Int(1) << 40;      // further than any key stands from any query
        Int left = far, right = c.is_causal ? 0 : far;
        if (c.left >= 0) left = std::min(left, c.left);
        if (c.right >= 0) right = std::min(right, c.right);
        if (c.after) return {left, right};
        if (auto sigma = row(c.sigma, b, h)) {
            const double half_width = std::ceil(*sigma*rate+1)-1;
            if (half_width < left) left = (Int)half_width;
            if (half_width < right) right = (Int)half_width;
        } else if (auto table = row(c.table, b, h)) {
            Int first = 0, end = c.table_size;
            while (first < end && table[first] == -INFINITY) first++;
            while (first < end && table[end-1] == -INFINITY) end--;
            left = std::min(left, std::max<Int>(-(first+c.table_first), 0));
            right = std::min(right, std::max<Int>(end-1+c.table_first, 0));
        }
        return {left, right};
    }
    Int texts(Int b) const { return c.texts ? c.text_of[b+1]-c.text_of[b] : 1; }
    Text whole_text(Int b, Int t) const {  // before keys that take no part are left out
        if (!c.texts) return {0, c.N, 0, c.M, c.origins ? c.origins[b] : 0, c.q_offset};
        const Int *at = c.texts+5*(c.text_of[b]+t);
        const Int q0 = at[0], q1 = at[1], k0 = at[2], k1 = at[3], shift = at[4];
        return {q0, q1, k0, k1, k0, shift};
    }
    // The first key that a row may see, and no row behind it sees an earlier one.
    Int first_key(Int b, Int row, Int left) const {
        Int t = 0;
        while (t+1 < texts(b) && whole_text(b, t+1).q0 <= row) t++;
        const Text x = whole_text(b, t);
        return std::max(x.k0, std::min(row+x.shift-left, x.k1));
    }
    // Without the keys at its ends that take no part; `holes`: whether others do not either.
    Text text(Int b, Int t, bool &holes) const {
        Text x = whole_text(b, t);
        holes = false;
        if (!c.keep) return x;
        const uint8_t *keep = c.keep+b*c.M;
        while (x.k0 < x.k1 && !keep[x.k0]) x.k0++;
        while (x.k0 < x.k1 && !keep[x.k1-1]) x.k1--;
        holes = memchr(keep+x.k0, 0, x.k1-x.k0);
        return x;
    }
};

// ---- entmax: thresholds -------------------------------------------------------------------------

// Weights p = [1 + eps (score - a)]^(1/eps), with the threshold a for which a row sums to one.
// Of QUERIES rows side by side, a score of each in S[key]; or `lengthwise`, of GROUPS rows, LANES
// scores of each.
template <class real, int QUERIES, bool lengthwise = false> struct Solver : Lanes<real, QUERIES> {
    typedef Lanes<real, QUERIES> L;
    using typename L::vec; using typename L::ivec; using typename L::C;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat;

    enum { GROUP = lengthwise ? 4 : 16 };  // vectors whose largest score bounds a threshold
    real *S;                               // [row][QUERIES] scores, then weights
    int32_t *live;                         // of a row of S the key: all, then those of the list
    real eps;                              // alpha - 1

    // A sum of a row, or its maximum, in all of its lanes.
    template <class F> static INLINE vec joined(vec x, F &&two) {
        if (lengthwise) UNROLL for (int s = 1; s < LANES; s *= 2) {
            vec y;
            UNROLL for (int l = 0; l < LANES; l++) y[l] = x[l^s];
            x = two(x, y);
        }
        return x;
    }
    static INLINE vec row_sum(vec x) { return joined(x, [](vec a, vec b) { return a+b; }); }
    // Weight and slope s = p^(1-eps) of y = score - a.
    INLINE void law(vec y, vec &w, vec &s) const {
        vec t = y*eps;
        ivec in = t > -1;
        t = in ? t : splat(0);
        if (eps == real(.5)) {
            s = t+1;
            w = s*s;
        } else if (eps == 1) {
            s = splat(1);
            w = t+1;
        } else {
            s = L::template exp2<true>(L::log1p(t)*(1/eps-1)*real(M_LOG2E));
            w = s*(t+1);
        }
        w = in ? w : splat(0);
        s = in ? s : splat(0);
    }
    // Newton's step on sum^eps, which never goes too far from below.
    INLINE vec newton(vec sum, vec slopes) const {
        vec by = slopes > 0 ? slopes : splat(1);
        if (eps == real(.5)) return 2*(sum-L::sqrt(sum))/by;
        if (eps == 1) return (sum > 0 ? sum-1 : sum)/by;
        vec less = L::expm1(-eps*L::log(sum > 0 ? sum : splat(1)));
        return less/-eps*sum/by;
    }
    // The largest score of every group of keys is a part of the row, and its threshold a lower
    // bound of the row's.
    Int add_best(const real *x, Int n, real *best, Int groups, vec *top) const {
        for (Int j = 0; j < n; j += GROUP, groups++) for (int v = 0; v < GROUPS; v++) {
            vec most = load(x+j*QUERIES+v*LANES);
            for (Int i = j+1; i < std::min<Int>(j+GROUP, n); i++)
                most = L::max(most, load(x+i*QUERIES+v*LANES));
            store(best+groups*QUERIES+v*LANES, most);
            top[v] = L::max(top[v], most);
        }
        return groups;
    }
    // Scores in S become weights of keys in the list, and `a` thresholds less the maxima. No key is
    // dropped where the caller wants all, in short rows and near softmax, and where most keys have
    // weight.
    Int solve(Int n, real *best, Int groups, const vec *top, vec *a, bool all) {
        for (int v = 0; v < GROUPS; v++) a[v] = vec{};
        const bool is_short = n <= 4*GROUP, has_no_zeros = eps < real(.05);
        if (!all) all = is_short || has_no_zeros || bound(n, best, groups, top, a);
        const Solver own = *this;                              // which no store changes
        return all ? own.template solve_as<true>(n, best, top, a)
                   : own.template solve_as<false>(n, best, top, a);
    }
    // Thresholds of the largest of every group, from below; whether most keys, of one from each
    // group, have weight.
    bool bound(Int n, const real *best, Int groups, const vec *top, vec *a) const {
        for (int v = 0; v < GROUPS; v++) for (int i = 0; i < 4; i++) {
            vec sum{}, slopes{}, w, s;
            for (Int j = 0; j < groups; j++) {
                law(load(best+j*QUERIES+v*LANES)-top[v]-a[v], w, s);
                sum += w;
                slopes += s;
            }
            a[v] += L::max(newton(row_sum(sum), row_sum(slopes)), splat(0));
        }
        Int some = 0;
        for (Int j = 0; j < n; j += GROUP) {
            ivec in{};
            for (int v = 0; v < GROUPS; v++)
                in |= (load(S+j*QUERIES+v*LANES)-top[v]-a[v])*eps > -1;
            some += L::any(in);
        }
        return some*GROUP*4 > n*3;
    }
    // Rows of S move to the front, in their order, and their keys in the list with them; `work`
    // stores row j as row `to`, and returns the lanes that may give it weight. Without any it falls
    // out, unless `all` stay. The number of those that are left.
    template <bool all, class F> INLINE Int compact(Int n, F &&work) const {
        Int left = 0;
        for (Int j = 0; j < n; j++) {
            const ivec some = work(j, left);
            live[left] = live[j];
            left += all || L::any(some);
        }
        return left;
    }
    // Keys without weight fall out of the list at each of Newton's steps, and the last step changes
    // the weights themselves, by their slopes.
    template <bool all> INLINE Int solve_as(Int n, real *best, const vec *most, vec *a) const {
        vec top[GROUPS], low[GROUPS];
        for (int v = 0; v < GROUPS; v++) {
            top[v] = most[v];
            low[v] = a[v]-1/eps;
        }
        for (Int j = 0; j < n; j++) live[j] = (int32_t)j;
        Int m = compact<all>(n, [&](Int j, Int to) INLINED {
            ivec some{};
            for (int v = 0; v < GROUPS; v++) {
                vec x = load(S+j*QUERIES+v*LANES)-top[v];
                some |= x > low[v];
                store(S+to*QUERIES+v*LANES, x);
            }
            return some;
        });
        // near the solution a step is as the square of the last one: up to alpha = 1.5, where the
        // slope of the sum has no kinks, the next is known, and it is the last step, if its square,
        // which slopes leave out, is nothing. One that hardly shrinks is rounding, and would not
        // end.
        const real enough = eps <= real(.5) ? std::sqrt(C::converged)/4 : C::converged;
        vec last[GROUPS];
        for (int v = 0; v < GROUPS; v++) last[v] = splat(INFINITY);
        ivec more = splat(0) == splat(0);
        for (int i = 0; i < 60 && L::any(more); i++) {
            vec sum[GROUPS], slopes[GROUPS];
            for (int v = 0; v < GROUPS; v++) sum[v] = slopes[v] = vec{};
            m = compact<all>(m, [&](Int j, Int to) INLINED {
                ivec some{};
                for (int v = 0; v < GROUPS; v++) {
                    vec x = load(S+j*QUERIES+v*LANES), w, s;
                    law(x-a[v], w, s);
                    sum[v] += w;
                    slopes[v] += s;
                    some |= w > 0;
                    if (to < j) store(S+to*QUERIES+v*LANES, x);
                }
                return some;
            });
            more = ivec{};
            for (int v = 0; v < GROUPS; v++) {
                vec step = newton(row_sum(sum[v]), row_sum(slopes[v])), size = L::max(step, -step);
                vec next = i && eps <= real(.5) ? size*size*size/(last[v]*last[v]) : size;
                a[v] += step;
                ivec unsolved = size >= enough, next_step_matters = 16*next >= enough;
                ivec still_shrinking = (size <= last[v]/2) | (last[v] >= std::sqrt(C::converged));
                more |= unsolved & next_step_matters & still_shrinking;
                last[v] = size;
            }
        }
        real *slope = best;                                    // the bounds are found
        vec sum[GROUPS], slopes[GROUPS], by[GROUPS];
        for (int v = 0; v < GROUPS; v++) sum[v] = slopes[v] = vec{};
        for (Int j = 0; j < m; j++) for (int v = 0; v < GROUPS; v++) {
            vec w, s;
            law(load(S+j*QUERIES+v*LANES)-a[v], w, s);
            sum[v] += w;
            slopes[v] += s;
            store(S+j*QUERIES+v*LANES, w);
            store(slope+j*QUERIES+v*LANES, s);
        }
        for (int v = 0; v < GROUPS; v++) {
            vec of_row = row_sum(sum[v]), falls = row_sum(slopes[v]);
            by[v] = (of_row-1)/(falls > 0 ? falls : splat(1));
            a[v] += newton(of_row, falls);
        }
        return compact<all>(m, [&](Int j, Int to) INLINED {
            ivec some{};
            for (int v = 0; v < GROUPS; v++) {
                vec w = load(S+j*QUERIES+v*LANES)-load(slope+j*QUERIES+v*LANES)*by[v];
                w = L::max(w, splat(0));
                some |= w > 0;
                store(S+to*QUERIES+v*LANES, w);
            }
            return some;
        });
    }
    static constexpr auto psi_terms = [] {                     // of the series in `phi`
        std::array<real, C::PSI_TERMS+1> terms{};
        for (int k = 2; k <= C::PSI_TERMS; k++) terms[k] = real((k-1)*inverse_factorial(k));
        return terms;
    }();
    // The gradient of alpha is -sum of ds phi, phi = (l e^l - e^l + 1)/eps^2 with l = eps log p, so
    // e^l = 1+t: a series near 0. There 1/eps^2 may be infinite, which is not chosen.
    INLINE vec phi(vec t, vec l) const {
        const real by = 1/eps;
        vec series = splat(0), log_p = l*by;
        UNROLL for (int k = C::PSI_TERMS; k >= 2; k--) series = series*l + psi_terms[k];
        return l < real(-.5) ? ((l-1)*(t+1)+1)*(by*by) : log_p*log_p*series;
    }
    // The same at the mean `t` of a row under its slopes. The ds of a row sum to zero but for
    // rounding, which a phi that is large and alike for all keys would multiply; so phi counts from
    // this one.
    INLINE vec typical_phi(vec t) const {
        t = L::max(t, splat(std::numeric_limits<real>::epsilon()-1));
        return phi(t, L::log1p(t));
    }
};

// ---- numbers that are not finite ----------------------------------------------------------------

// A row is lost, and written as NaN, where its query is not finite, where it sees a key or a value
// that is not, and where a score is no number. No other row changes. Products alone would lose
// more: 0 times NaN is NaN, so a weight of zero protects no query from a key that its neighbour
// sees. What is checked, and what follows:
//   - of a head, alpha: if it is no number from 1 to 2, all rows are lost; and what its window and
//     bias add to scores: if that is NaN at some offset, each score is checked;
//   - of a text, its keys and values: if one is not finite, each block has one query, and exactly
//     the keys that it sees. A query that comes alone has such a block already, and reads its keys
//     only once: its scores show a broken key, and its output a broken value;
//   - of a block, its queries: one that is not finite is lost, and computed as zeros. If finite
//     numbers may have a product that is not, each score is checked as well.
// Padding needs no guard: `Keys` copies keys that take no part as zeros.
template <class real, int QUERIES> struct Guard {
    typedef Lanes<real, QUERIES> L;
    typedef typename L::In In;

    bool no_alpha;             // of the head: alpha is no number from 1 to 2
    bool adds_nan;             // of the head: its bias or window is no number at some offset
    bool alone;                // of the text: one query, whose keys were not checked
    bool broken;               // of the text: a key or value is not finite
    real largest_key;          // of the text: the largest number among its keys
    bool checks_scores;        // of the block: each score is checked
    bool lost[QUERIES];        // of the block

    void begin_head(real eps, bool head_adds_nan) {
        no_alpha = !(eps <= 1);
        adds_nan = head_adds_nan;
    }
    void begin_text(bool is_alone) {
        alone = is_alone;
        broken = false;
        largest_key = 0;
    }
    void check_text(real largest_of_keys, real largest_of_values) {
        largest_key = std::max(largest_key, largest_of_keys);
        broken |= largest_key == INFINITY || largest_of_values == INFINITY;
    }
    void begin_block() { checks_scores = broken || adds_nan; }
    // Query i of the block, whose scores are its products times `by`.
    void check_query(Int i, real *query, Int width, real by) {
        const real most = L::largest({query, width}, 1, width);
        const real product = std::max(most, std::abs(most*by))*largest_key*width;
        lost[i] = no_alpha || most == INFINITY;
        if (lost[i]) lose(i, query, width);
        else if (!(product < std::numeric_limits<real>::max())) checks_scores = true;
    }
    void lose(Int i, real *query, Int width) {
        lost[i] = true;
        memset(query, 0, width*sizeof(real));
    }
    // Products [n][QUERIES] of a few queries: those of a query that comes alone show a broken key.
    void check_products(const real *x, Int n) {
        for (Int j = 0; alone && j < n; j++) broken |= !(std::abs(x[j*QUERIES]) < INFINITY);
        checks_scores |= broken;
    }
    // Scores of a key. A query that sees it is lost if that is not finite, or its score no number.
    template <class F, class K> void check_scores(real *x, Int queries, K &&is_broken, F &&sees) {
        const bool broken_key = broken && is_broken();
        for (Int i = 0; i < queries; i++) {
            if (!sees(i)) x[i] = -INFINITY;
            else if (broken_key || x[i] != x[i]) {
                x[i] = 0;
                lost[i] = true;
            }
        }
    }
    bool is_lost(Int i, real lse) const { return lost[i] || lse != lse; }
    bool reads_keys() const { return !(broken && lost[0]); }   // backward, where 0 times NaN is NaN
};

// ---- memory -------------------------------------------------------------------------------------

// Hands out a thread's memory, array by array; without a start it only counts.
struct Room {
    char *start;
    Int used;
    template <class T> T *take(Int n) {
        T *x = start ? (T*)(start+used) : nullptr;
        used += rounded(n*(Int)sizeof(T), 64);
        return x;
    }
};

// ---- a head: what it adds by offset -------------------------------------------------------------

template <class real, int QUERIES> struct Head : Lanes<real, QUERIES> {
    typedef Lanes<real, QUERIES> L;
    using typename L::vec; using typename L::ivec;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat;

    const Problem<real> &p;
    const Call &c;
    const Grads *g;            // null in the forward pass
    Int b, h, hk;              // its batch row, its number, and that of its key head
    Int left, right;           // its reach
    Int zero, length;          // place of offset 0, number of places
    real eps;                  // alpha - 1
    real unit;                 // of the scores: log2(e) for softmax, whose exponentials are powers
                               // of two, else 1
    real sink;                 // in this unit
    const real *bias;          // [2*bias_reach+1], or null
    real *near;                // [length] what is added to scores: window, limits and bias
    real *times;               // [length] a window after the softmax
    real *slope;               // [length] of the window by sigma
    real *sums, *times_sums;   // [LANES][length] gradients, see `add_diagonal`
    Sums found;                // of this task and head

    Head(const Problem<real> &problem, const Grads *grads) : p(problem), c(p.c), g(grads) {}

    void lay_out(Room &room) {
        const Int by_offset = p.reach_most+6*QUERIES+4;
        near = room.take<real>(by_offset);
        times = room.take<real>(by_offset);
        slope = room.take<real>(by_offset);
        sums = room.take<real>(by_offset*LANES);
        times_sums = room.take<real>(c.after ? by_offset*LANES : 0);
    }
    void begin(Int batch, Int head) {
        choose(batch, head);
        curve(0, length);
        if (g) {
            memset(sums, 0, length*LANES*sizeof(real));
            if (c.after) memset(times_sums, 0, length*LANES*sizeof(real));
        }
    }
    void choose(Int batch, Int head) {
        b = batch;
        h = head;
        hk = h/p.share;
        const Reach r = p.reaches[b*c.H+h];
        left = r.left;
        right = r.right;
        zero = rounded(right+QUERIES+4, LANES);
        length = rounded(zero+left+2*QUERIES, LANES);
        const real *alpha = p.row(c.alpha, b, h);
        eps = alpha ? std::max(*alpha-1, real(0x1p-64)) : 0;
        unit = alpha ? 1 : real(M_LOG2E);
        bias = p.row(c.rel_bias, b, h);
        if (c.sink.data) sink = unit**p.row(c.sink, b, h);
    }
    // Of offset j - p; neighbouring queries have neighbouring places, in their order.
    Int place(Int offset) const { return zero-offset; }
    Int bias_place(Int offset) const {
        return std::min(std::max(offset, -c.bias_reach), c.bias_reach)+c.bias_reach;
    }
    real bias_at(Int offset) const { return bias[bias_place(offset)]; }
    // Whether a number that a score gets by its offset is NaN. Leading keys are without a window.
    bool adds_nan() const {
        bool found = false;
        const Int by_offset = bias || c.table.data ? length : 0;
        const Int of_bias = bias && c.n_global ? 2*c.bias_reach+1 : 0;
        for (Int x = 0; x < by_offset; x++) found |= near[x] != near[x];
        for (Int x = 0; x < of_bias; x++) found |= bias[x] != bias[x];
        return found;
    }

    // The window, its limits and the bias by offset, at whole vectors of places. The default window
    // is tanh(s expm1(z))/tanh(p) with z = L (1 - y^2), y = |j - i|/edge, edge = rate sigma + 1, s
    // the steepness.
    void curve(Int first, Int end) {
        const real *sigma = p.row(c.sigma, b, h), *table = p.row(c.table, b, h);
        const real edge = sigma ? *sigma*real(p.rate)+1 : 1;
        const real level = p.level, steep = p.steepness, norm = p.norm;
        vec ramp;
        for (int l = 0; l < LANES; l++) ramp[l] = l;
        for (Int x = first; x < end; x += LANES) {
            vec at = real(x) + ramp, off = real(zero) - at, m = splat(0), d = splat(0);
            ivec in = (at <= real(zero+left)) & (at >= real(zero-right));
            if (sigma) {
                vec y = off/edge, z = L::max(level-level*y*y, splat(0));
                vec e = L::expm1(z), t = L::tanh(steep*e);
                ivec some = in & (t*norm >= std::numeric_limits<real>::min());
                if (g) d = (1-t*t)*steep*(e+1)*(2*level)*y*y/edge*real(p.rate);
                if (c.after) {
                    m = t*norm;
                    d *= norm;
                } else {
                    m = L::log(some ? t*norm : splat(1));
                    d /= t;
                    in = some;
                }
                d = some ? d : splat(0);
            } else if (table) for (int l = 0; l < LANES; l++) {
                const Int entry = zero-x-l-c.table_first;
                const bool beyond = entry < 0 || entry >= c.table_size;
                if (!beyond) m[l] = table[entry];
                else m[l] = c.after ? real(0) : -INFINITY;
            }
            store(slope+x, d);
            if (c.after) {
                store(times+x, m);
                m = splat(0);
            }
            if (bias) for (int l = 0; l < LANES; l++) m[l] += bias_at(zero-x-l);
            store(near+x, in ? m*unit : splat(-INFINITY));
        }
        for (Int x = length; x < length+LANES; x++) slope[x] = 0;
    }
    // Sums along diagonals: QUERIES numbers, from the place `first` on. A copy for each
    // misalignment keeps the additions aligned: copy first%LANES, place first/LANES.
    void add_diagonal(real *to, Int first, const real *x) {
        real *sum = to+first%LANES*length+first/LANES*LANES;
        for (int v = 0; v < GROUPS; v++)
            store(sum+v*LANES, load(sum+v*LANES)+load(x+v*LANES));
    }
    // Sums by offset to the gradients of sigma, of a table and of the bias.
    void end() {
        const real *window = c.after ? times_sums : sums;
        vec dsigma{};
        for (Int copy = 0; copy < LANES; copy++) for (Int y = 0; y < length; y += LANES) {
            vec by_window = load(window+copy*length+y);
            if (g->dsigma) dsigma += by_window*load(slope+y+copy);
            for (Int l = 0; (g->dtable || g->drel_bias) && l < LANES; l++) {
                const Int offset = zero-(y+copy+l), entry = offset-c.table_first;
                if (g->dtable && entry >= 0 && entry < c.table_size)
                    found.table()[entry] += by_window[l];
                if (g->drel_bias && offset >= -left && offset <= right)
                    found.rel_bias()[bias_place(offset)] += sums[copy*length+y+l];
            }
        }
        *found.sigma() += L::total(dsigma);
    }
};

// ---- a text: where its keys lie -----------------------------------------------------------------

// Keys lo..hi-1 of a piece, which begin at a row of S; far: without the window.
struct Span { Int lo, hi; bool far; Int piece, row; };

template <class real, int QUERIES> struct Keys {
    typedef Lanes<real, QUERIES> L;
    typedef Tiles<real, QUERIES> T;
    typedef typename L::In In;
    typedef Matrix<const uint16_t> Small;  // bfloat16 numbers

    const Problem<real> &p;
    const Call &c;
    Int b, hk;                 // batch row and key head
    Text text;
    const uint8_t *keep;       // [M] of the batch row; or null
    bool holes;                // whether keys within the text take no part
    bool back;                 // whether this is the backward pass
    bool may_tile;             // whether products may be those of `Tiles`
    bool may_lie;              // whether a query or two may read bfloat16 rows as they lie
    enum { PLAIN, TILED, LYING } way;      // how this text is read
    struct Piece {             // leading keys, the others
        In k, v;
        Small k_rows, v_rows;              // in their place: bfloat16 numbers
        Small k_across, v_across;          // of tiles: [width][keys]
        Int lo, hi;
    } piece[2];
    real *copies, *free;       // of rows that are not read where they lie; where no copy is yet

    Keys(const Problem<real> &problem, bool back)
        : p(problem), c(p.c), back(back), may_tile(false), may_lie(false) {}
    bool tiled() const { return way == TILED; }

    // Rows of keys, or of values, in memory: d numbers, copied to whole vectors.
    struct Source { const char *data; const Rows &like; Int d, width; };

    void lay_out(Room &room, Int rows) {
        lay_out_keys(room, p.lead+(c.n_global ? c.M : std::min(c.M, rows+p.reach_most)));
    }
    void lay_out_keys(Room &room, Int n) {
        const bool none = !c.keep && lies_ready(c.k, c.d) && lies_ready(c.v, c.dv);
        Int numbers = none ? 0 : n*(p.width+p.dv_width);
        if (may_tile) {        // of bfloat16, two to a `real`
            const Int spare = 2*(32+3*32), across = std::max(p.width, p.dv_width);
            numbers = std::max(numbers, (n*(p.depth+p.dv_depth)+(n+spare)*across)/2);
        }
        copies = room.take<real>(numbers+4*64/sizeof(real));
    }
    template <class number> number *copy(Int n) {
        number *x = (number*)free;
        free += rounded(n*sizeof(number), 64)/sizeof(real);
        return x;
    }
    // Whether rows are read where they lie. Far apart, they would miss the caches for each block
    // anew.
    bool lies_ready(const Rows &x, Int d) const {
        const bool in_vectors = is_of<real>(c.kind) && x.e == 1 && d%L::LANES == 0;
        return in_vectors && near_together(x, d);
    }
    bool near_together(const Rows &x, Int d) const { return x.n == d || c.N <= QUERIES; }
    // Rows q0..q1-1 become those in text `t`, and its keys are laid ready.
    void begin(Int batch, Int key_head, Int t, Reach reach, Int &q0, Int &q1) {
        find(batch, key_head, t, reach, q0, q1);
        if (q0 < q1) lay_ready();
    }
    void find(Int batch, Int key_head, Int t, Reach reach, Int &q0, Int &q1) {
        b = batch;
        hk = key_head;
        text = p.text(b, t, holes);
        keep = c.keep ? c.keep+b*c.M : nullptr;
        q0 = std::max(q0, text.q0);
        q1 = std::min(q1, text.q1);
        if (q0 >= q1) return;
        const Int lead = std::max(text.k0, text.origin);
        const Int lead_end = std::max(text.k0, std::min(text.origin+c.n_global, text.k1));
        Int lo = std::max(lead_end, q0+text.shift-reach.left);
        Int hi = std::min(text.k1, q1+text.shift+reach.right);
        const bool some_see_all = c.n_global && q0+text.shift < text.origin+c.n_global;
        if (some_see_all) {
            lo = lead_end;
            hi = text.k1;
        }
        piece[0].lo = lead;
        piece[0].hi = c.n_global ? lead_end : lead;
        piece[1].lo = lo;
        piece[1].hi = std::max(lo, hi);
        way = q1-q0 > 2 ? may_tile ? TILED : PLAIN : may_lie && !holes ? LYING : PLAIN;
    }
    void lay_ready() {
        free = copies;
        for (int i = 0; i < 2; i++) if (piece[i].lo < piece[i].hi) set_piece(i, piece[i]);
    }
    void set_piece(int i, Piece &x) {
        Source k = {p.place(c.k, b, hk, 0), c.k, c.d, p.width};
        Source v = {p.place(c.v, b, hk, 0), c.v, c.dv, p.dv_width};
        const Int n = x.hi-x.lo;
        Int first = x.lo;                                      // row of key `lo` in them
        if (c.heads) {                                         // a cache
            const Int *own = c.heads+3*(b*c.Hkv+hk);
            k.data = (const char*)own[0];
            v.data = (const char*)own[1];
            first = i ? x.lo-own[2] : x.lo-text.origin;
        }
        if (way == LYING) {
            x.k_rows = {(const uint16_t*)k.data+first*k.like.n, k.like.n};
            x.v_rows = {(const uint16_t*)v.data+first*v.like.n, v.like.n};
            return;
        }
        if constexpr (T::exist) if (way == TILED) {
            x.k_rows = tile_rows(k, first, x.lo, n, p.depth);
            if (back) {
                x.v_rows = tile_rows(v, first, x.lo, n, p.dv_depth);
                x.k_across = tile_across(k, first, x.lo, n);
            } else x.v_across = tile_across(v, first, x.lo, n);
            return;
        }
        x.k = rows_of(k, first, x.lo, n);
        x.v = rows_of(v, first, x.lo, n);
    }
    // The largest numbers of a piece, or of one of its keys; infinity where one is not finite.
    real largest_key(const Piece &x) const { return largest_key(x, x.lo, x.hi-x.lo); }
    real largest_key(const Piece &x, Int key, Int n = 1) const {
        return way == PLAIN ? L::largest(x.k.below(key-x.lo), n, p.width)
                            : L::largest(x.k_rows.below(key-x.lo), n, c.d);
    }
    real largest_value(const Piece &x) const {
        if (way == TILED && !back) return L::largest(x.v_across, c.dv, x.hi-x.lo);
        return way == PLAIN ? L::largest(x.v, x.hi-x.lo, p.dv_width)
                            : L::largest(x.v_rows, x.hi-x.lo, c.dv);
    }
    // n rows from `first` on, which are those of `key` and on: as they lie, or copied, because of
    // another dtype or stride, of rows that are not whole vectors, or of holes.
    In rows_of(const Source &x, Int first, Int key, Int n) {
        if (!holes && lies_ready(x.like, x.d))
            return {(const real*)x.data+first*x.like.n, x.like.n};
        const Int row_bytes = x.like.n*bytes_of(c.kind);
        real *to = copy<real>(n*x.width);
        for (Int j = 0; j < n; j++) {
            real *row = to+j*x.width;
            const char *from = x.data+(first+j)*row_bytes;
            fetch(from+8*row_bytes, x.d*bytes_of(c.kind));
            memset(row, 0, x.width*sizeof(real));
            if (!is_hole(key+j)) read_row(row, from, x.d, x.like.e, c.kind);
        }
        return {to, x.width};
    }
    // The same for tiles of keys in rows: numbers stay as they are, rows are `width` long.
    Small tile_rows(const Source &x, Int first, Int key, Int n, Int width) {
        const uint16_t *from = (const uint16_t*)x.data+first*x.like.n;
        if (!holes && x.like.e == 1 && x.d == width && near_together(x.like, x.d))
            return {from, x.like.n};
        uint16_t *to = copy<uint16_t>(n*width);
        for (Int j = 0; j < n; j++)
            tile_row(to+j*width, is_hole(key+j) ? nullptr : from+j*x.like.n, x, width);
        return {to, width};
    }
    static void tile_row(uint16_t *to, const uint16_t *from, const Source &x, Int width) {
        memset(to, 0, width*sizeof(uint16_t));
        if (!from) return;
        if (x.like.e == 1) memcpy(to, from, x.d*sizeof(uint16_t));
        else for (Int e = 0; e < x.d; e++) to[e] = from[e*x.like.e];
    }
    // Rows exchanged with columns, for tiles of sums over keys; zeros behind the last key.
    Small tile_across(const Source &x, Int first, Int key, Int n) {
        enum { SOME = 32 };
        const Int row = (rounded(n, SOME)+SOME)|SOME;          // not all rows in the same places
        const uint16_t *from = (const uint16_t*)x.data+first*x.like.n, *rows[SOME];
        const bool as_they_lie = x.like.e == 1 && x.d == x.width;
        uint16_t *own = copy<uint16_t>(SOME*x.width), *to = copy<uint16_t>(x.width*row);
        for (Int j0 = 0; j0 < row; j0 += SOME) {
            for (Int j = j0; j < j0+SOME; j++) {
                const bool none = j >= n || is_hole(key+j);
                uint16_t *copied = own+(j-j0)*x.width;
                rows[j-j0] = none || !as_they_lie ? copied : from+j*x.like.n;
                if (rows[j-j0] == copied)
                    tile_row(copied, none ? nullptr : from+j*x.like.n, x, x.width);
            }
            T::across(to+j0, row, rows, x.width);
        }
        return {to, row};
    }
    bool is_hole(Int key) const { return holes && !keep[key]; }
    // Keys and values from `key` on, as they follow each other in a piece.
    In k(const Span &s, Int key) const { return piece[s.piece].k.below(key-piece[s.piece].lo); }
    In v(const Span &s, Int key) const { return piece[s.piece].v.below(key-piece[s.piece].lo); }
};

// ---- a block: some queries and the keys they see ------------------------------------------------

template <class real, int QUERIES> struct Block : Lanes<real, QUERIES> {
    typedef Lanes<real, QUERIES> L;
    using typename L::vec; using typename L::In; using typename L::Out;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat;
    using L::product; using L::product_apart;
    typedef Tiles<real, QUERIES> T;

    const Problem<real> &p;
    const Call &c;
    const Grads *g;            // null in the forward pass
    Head<real, QUERIES> head;
    Keys<real, QUERIES> keys;
    Guard<real, QUERIES> guard;

    Int row, at, nq;           // its first row, the position of that, its number of queries
    Span spans[2];             // the keys it sees: leading ones, the others
    Int n_spans, n_keys;
    uint32_t seeds[QUERIES];   // of dropout
    real *q_rows, *q_cols;     // queries: [QUERIES][width]; [width][QUERIES], scaled
    real *dout_rows, *dout_cols;           // [QUERIES][dv_width]; [dv_width][QUERIES]
    real *o_rows, *dq_rows;    // [QUERIES][dv_width]; [QUERIES][width]
    real *S, *D;               // [key][QUERIES] scores, then weights; gradients of either
    real *bend, *factor;       // [key][QUERIES] slopes of the soft cap; factors of the weights
    // of tiles: pairs of queries [depth/2][QUERIES][2] and of weights [keys/2][QUERIES][2]; some
    // keys or values [16][depth]; the output across, [dv_width][QUERIES]
    uint16_t *q_pairs, *w_pairs, *some_rows;
    real *o_cols;
    // and backward: pairs of dO across and of rows, [dv_depth/2][QUERIES][2], [QUERIES/2][dv][2];
    // of rows of queries, [QUERIES/2][width][2]; weights in rows [keys][QUERIES]; gradients of some
    // keys [16][width], and of queries across, [width][QUERIES]
    uint16_t *dout_pairs, *dout_row_pairs, *q_row_pairs, *w_rows;
    real *some_grads, *dq_cols;

    Block(const Problem<real> &problem, const Grads *grads)
        : p(problem), c(p.c), g(grads), head(p, g), keys(p, g) {}

    static Int most_keys(const Problem<real> &p) {  // rows of S: of a run, with alpha of a block
        const Call &c = p.c;
        const Int n = c.n_global ? c.M : std::min(c.M, p.reach_most+QUERIES+4);
        if (!c.alpha.data) return std::min<Int>(n, KEYS);
        return n+p.lead+5;                          // one more: the sink; and whole fours
    }
    void lay_out(Room &room) {
        const Int scores = rounded(most_keys(p), 32)*QUERIES;
        q_rows = room.take<real>(QUERIES*p.width);
        q_cols = room.take<real>(QUERIES*p.width);
        dout_rows = room.take<real>(QUERIES*p.dv_width);
        dout_cols = room.take<real>(QUERIES*p.dv_width);
        o_rows = room.take<real>(QUERIES*p.dv_width);
        dq_rows = room.take<real>(QUERIES*p.width);
        S = room.take<real>(scores);
        D = room.take<real>(scores);
        bend = room.take<real>(c.softcap > 0 ? scores : 0);
        factor = room.take<real>(p.has_factors ? scores : 0);
        if (keys.may_tile) {
            q_pairs = room.take<uint16_t>(p.depth*QUERIES);
            w_pairs = room.take<uint16_t>(scores);
            some_rows = room.take<uint16_t>(16*std::max(p.depth, p.dv_depth));
            o_cols = room.take<real>(p.dv_width*QUERIES);
            dout_pairs = room.take<uint16_t>(p.dv_depth*QUERIES);
            dout_row_pairs = room.take<uint16_t>(p.dv_width*QUERIES);
            q_row_pairs = room.take<uint16_t>(p.width*QUERIES);
            w_rows = room.take<uint16_t>(scores);
            some_grads = room.take<real>(16*std::max(p.width, p.dv_width));
            dq_cols = room.take<real>(p.width*QUERIES);
        }
        head.lay_out(room);
    }

    // ---- which queries, which keys

    void begin_head(Int b, Int h) {
        head.begin(b, h);
        guard.begin_head(head.eps, head.adds_nan());
    }
    // Rows q0..q1-1 become those in text `t`.
    void begin_text(Int t, Int &q0, Int &q1) {
        keys.begin(head.b, head.hk, t, {head.left, head.right}, q0, q1);
        if (q0 >= q1) return;
        guard.begin_text(q1-q0 == 1 && !g && !c.alpha.data);
        if (guard.alone) return;
        for (const auto &x : keys.piece)
            if (x.lo < x.hi) guard.check_text(keys.largest_key(x), keys.largest_value(x));
        if (!guard.broken || keys.way == keys.PLAIN) return;
        keys.way = keys.PLAIN;             // without tiles: one query a block
        keys.lay_ready();
    }
    // The rows from `i` on that see alike; the first row behind them.
    Int begin(Int i, Int end) {
        const Text &text = keys.text;
        row = i;
        at = i+text.shift;
        const Int lead = text.origin, lead_end = lead+c.n_global;
        const bool is_global = at >= lead && at < lead_end, is_before = c.n_global && at < lead;
        if (is_global) end = std::min(end, lead_end-text.shift);
        if (is_before) end = std::min(end, lead-text.shift);
        // both passes of entmax have the same blocks, whose bits name the live keys
        const Int next_block = i/QUERIES*QUERIES+QUERIES;
        if (c.alpha.data) end = std::min(end, next_block);
        nq = guard.broken ? 1 : std::min<Int>(QUERIES, end-i);
        n_spans = n_keys = 0;
        const auto &piece = keys.piece;
        add_span(0, piece[0].lo, piece[0].hi, true);
        if (is_global) add_span(1, piece[1].lo, piece[1].hi, true);
        else {
            Int lo = std::max(piece[1].lo, at-head.left), hi = at+nq+head.right;
            const Int whole_fours = lo+rounded(std::max<Int>(hi-lo, 0), 4); // for the micro-kernel
            if (!guard.broken) hi = whole_fours;
            add_span(1, lo, std::min(piece[1].hi, hi), false);
        }
        read_queries();
        return i+nq;
    }
    void add_span(int piece, Int lo, Int hi, bool far) {
        if (far && c.is_causal) hi = std::min(hi, at+nq);
        if (lo >= hi) return;
        spans[n_spans++] = {lo, hi, far, piece, n_keys};
        n_keys += hi-lo;
    }
    // `work(span, first key, keys)` for the keys of the block, at most `KEYS` at a time.
    template <class F> INLINE void each_run(F &&work) {
        for (Int x = 0; x < n_spans; x++) for (Int j0 = spans[x].lo; j0 < spans[x].hi; j0 += KEYS)
            work(spans[x], j0, std::min<Int>(KEYS, spans[x].hi-j0));
    }
    static Int row_of(const Span &s, Int key) { return s.row+key-s.lo; }
    static Int key_of(const Span &s, Int row) { return s.lo+row-s.row; }
    bool sees(const Span &s, Int key, Int i) const {
        const Int offset = key-at-i;
        if (keys.is_hole(key)) return false;
        if (!s.far) return head.near[head.place(offset)] != -INFINITY; // NaN is seen
        if (c.is_causal && offset > 0) return false;
        return !(head.bias && head.bias_at(offset) == -INFINITY);
    }
    Int in_call(Int i) const { return (head.b*c.H+head.h)*c.N+row+i; }    // row i, in [B,H,N]
    char *place(const Rows &x, Int i) const { return p.place(x, head.b, head.h, row+i); }

    // ---- scores

    void read_queries() {
        memset(q_rows, 0, QUERIES*p.width*sizeof(real));
        const real by = of_products();
        guard.begin_block();
        for (Int i = 0; i < nq; i++) {
            real *query = q_rows+i*p.width;
            read_row(query, place(c.q, i), c.d, c.q.e, c.kind);
            guard.check_query(i, query, p.width, by);
            if (c.dropout_p > 0) seeds[i] = row_seed(c.seed, head.b*c.H+head.h, row+i);
        }
        if constexpr (T::exist) if (keys.tiled()) {
            if (g) T::pairs(q_row_pairs, q_rows, QUERIES, p.width);
            return T::columns(q_pairs, q_rows, p.width, power_of_two(by));
        }
        if (nq > 2) L::turn(q_cols, q_rows, p.width, by);
        else for (Int i = 0; i < nq; i++) {                    // for `few_scores`
            real *to = q_cols+i*p.width;
            const real *from = q_rows+i*p.width;
            if (keys.way == keys.LYING) L::deal(to, from, p.width);
            else memcpy(to, from, p.width*sizeof(real));
            for (Int e = 0; e < p.width; e++) to[e] *= by;
        }
    }
    real of_products() const {     // what makes scores of them, or quotients of the soft cap
        return real(c.scale)*(c.softcap > 0 ? real(1/c.softcap) : head.unit);
    }
    // What bfloat16 queries can be multiplied by without rounding; the rest, from 1 to 2, comes
    // after their products, which so overflow only where the scores do.
    static real power_of_two(real by) {
        const bool has_one = by != 0 && std::abs(by) < INFINITY;
        return has_one ? std::ldexp(real(1), std::ilogb(by)) : 1;
    }
    real of_tiles() const { return of_products()/power_of_two(of_products()); }
    // Scores of keys j0..j0+n-1, in rows `first` and on of S, in units of the exponential: -inf
    // where a query may not look.
    void scores(const Span &s, Int j0, Int n, Int first) {
        if (keys.tiled()) tile_products(s, j0, n, first);
        else if (keys.way == keys.LYING) {
            const auto &x = keys.piece[s.piece];
            few_products(x.k_rows.below(j0-x.lo), n, first);
        } else products(keys.k(s, j0), n, first);
        const vec by = splat(keys.tiled() && !(c.softcap > 0) ? of_tiles() : 1);
        for (Int j = 0; j < n; j++) finish(s, j0+j, S+(first+j)*QUERIES, by);
    }
    void tile_products(const Span &s, Int j0, Int n, Int first) {
        const auto &x = keys.piece[s.piece];
        tile_rows_by(x, x.k_rows, j0, n, p.depth, q_pairs, S+first*QUERIES);
        if (c.softcap > 0) cap(S+first*QUERIES, bend+first*QUERIES, n, of_tiles());
    }
    // Rows of a piece, keys or values, times pairs of columns: [n][QUERIES].
    template <class Piece, class Rows>
    void tile_rows_by(const Piece &x, Rows all, Int j0, Int n, Int depth, const uint16_t *pairs,
                      real *to) {
        if constexpr (T::exist) {
            const Rows rows = all.below(j0-x.lo);
            auto multiply = [&](Int j, Rows of, Int n) {
                T::product({to+j*QUERIES, QUERIES}, of, {pairs, 2*QUERIES}, n, QUERIES, depth,
                           false);
            };
            Int whole = rounded(n, T::ROWS);
            if (j0+whole > x.hi) whole -= T::ROWS;             // not behind the last key
            multiply(0, rows, whole);
            if (whole >= n) return;
            for (Int j = whole; j < n; j++)
                memcpy(some_rows+(j-whole)*depth, rows.p+j*rows.row, depth*sizeof(uint16_t));
            multiply(whole, {some_rows, depth}, T::ROWS);
        }
    }
    void products(In k, Int n, Int first) {        // of keys and queries, and the soft cap
        if (nq <= 2) return few_products(k, n, first);
        real *to = S+first*QUERIES;
        product({to, QUERIES}, k, {q_cols, QUERIES}, n, QUERIES, p.width, false);
        if (c.softcap > 0) cap(to, bend+first*QUERIES, n, 1);
    }
    template <class Rows> void few_products(Rows k, Int n, Int first) {
        real *to = S+first*QUERIES;
        memset(to, 0, n*QUERIES*sizeof(real));
        L::few_scores(to, k, q_cols, n, nq, p.width);
        guard.check_products(to, n);
        if (c.softcap > 0) cap(to, bend+first*QUERIES, n, 1);
    }
    // The window, the bias, who may look; what came is multiplied before.
    INLINE void finish(const Span &s, Int key, real *x, vec by) {
        const real *m = head.near+head.place(key-at);
        if (keys.is_hole(key))
            for (int v = 0; v < GROUPS; v++) store(x+v*LANES, splat(-INFINITY));
        else if (!s.far)
            for (int v = 0; v < GROUPS; v++)
                store(x+v*LANES, load(x+v*LANES)*by+load(m+v*LANES));
        else for (int v = 0; v < GROUPS; v++) store(x+v*LANES, load(x+v*LANES)*by);
        const bool by_query = s.far && !keys.is_hole(key) && (head.bias || c.is_causal);
        for (int i = 0; by_query && i < QUERIES; i++) {
            if (c.is_causal && key > at+i) x[i] = -INFINITY;
            else if (head.bias) x[i] += head.unit*head.bias_at(key-at-i);
        }
        auto sees_key = [&](Int i) { return sees(s, key, i); };
        auto is_broken = [&] { return keys.largest_key(keys.piece[s.piece], key) == INFINITY; };
        if (guard.checks_scores) guard.check_scores(x, nq, is_broken, sees_key);
    }
    // c tanh(x/c), x/c being what came, multiplied; the derivative is kept
    void cap(real *x, real *slopes, Int n, real by) {
        for (Int i = 0; i < n*QUERIES; i += LANES) {
            vec t = L::tanh(load(x+i)*by);
            store(x+i, t*real(c.softcap*head.unit));
            store(slopes+i, 1-t*t);
        }
    }
    // Factors of the weights of a key, [QUERIES]: a window after the softmax, dropout.
    void factors(const Span &s, Int key, real *x) {
        const uint32_t cut = (uint32_t)std::lround(c.dropout_p*0x1p24);
        const real kept = c.dropout_p < 1 ? real(1/(1-c.dropout_p)) : 0;
        const real *m = head.times+head.place(key-at);
        for (int i = 0; i < QUERIES; i++) x[i] = c.after && !s.far ? m[i] : 1;
        if (c.dropout_p > 0)
            for (int i = 0; i < nq; i++) x[i] *= pair_bits(seeds[i], key) < cut ? 0 : kept;
    }
    void multiply(real *x, const real *by, Int n) {
        for (Int i = 0; i < n*QUERIES; i += LANES) store(x+i, load(x+i)*load(by+i));
    }

    // ---- results

    // O (+)= P V by tiles, from S and across, for keys j0..j0+n-1.
    void tile_mix(const Span &s, Int j0, Int n, bool more) {
        if constexpr (T::exist) {
            const Int whole = rounded(n, T::DEPTH);
            memset(S+n*QUERIES, 0, (whole-n)*QUERIES*sizeof(real));
            const auto &x = keys.piece[s.piece];
            auto add = [&](bool more) {
                T::pairs(w_pairs, S, whole, QUERIES);
                T::product({o_cols, QUERIES}, x.v_across.right(j0-x.lo), {w_pairs, 2*QUERIES},
                           p.dv_width, QUERIES, whole, more);
            };
            add(more);
            if (!c.kept) return;           // else dO·O is what the gradients of a row sum up to
            T::rests(S, whole*QUERIES);
            add(true);
        }
    }
    // The same by vectors, and dP = dO Vᵀ.
    INLINE void mix(const Span &s, Int j0, Int n, const real *weights, bool more) {
        if (keys.way == keys.LYING) {
            const auto &x = keys.piece[s.piece];
            return L::few_sums(o_rows, weights, x.v_rows.below(j0-x.lo), n, nq, p.dv_width, more);
        }
        product({o_rows, p.dv_width}, {weights, 1, QUERIES}, keys.v(s, j0),
                nq, p.dv_width, n, more);
    }
    INLINE void weight_grads(const Span &s, Int j0, Int n, real *to) {
        if (keys.tiled()) {
            const auto &x = keys.piece[s.piece];
            return tile_rows_by(x, x.v_rows, j0, n, p.dv_depth, dout_pairs, to);
        }
        product_apart({to, QUERIES}, keys.v(s, j0), {dout_cols, QUERIES},
                      n, QUERIES, p.dv_width, false);
    }
    // A row of the output: zero without a key, NaN where it is lost.
    void write_out(Int i, real by, real lse) {
        real *o = o_rows+i*p.dv_width;
        const bool empty = lse == INFINITY, lost = !empty && guard.is_lost(i, lse);
        if (empty || lost) std::fill(o, o+c.dv, lost ? NAN : 0);
        else for (Int e = 0; e < p.dv_width; e += LANES) store(o+e, load(o+e)*by);
        if (c.lse) ((real*)c.lse)[in_call(i)] = lost ? NAN : lse;
        write_row(place(c.out, i), o, c.dv, c.kind);
        if (c.kept && !c.alpha.data)
            memcpy((real*)c.kept+in_call(i)*c.dv, o, c.dv*sizeof(real));
    }
    // Weights of a key to where somebody looks at them, of each query `by` so much. A key that only
    // rounding added to the block has no column.
    void show(const Span &s, Int key, const real *w, const real *by) {
        const Int column = s.piece ? key-c.first_key+p.lead : key;
        if (column >= c.columns || (s.piece && column < p.lead)) return;
        real *to = (real*)c.weights+in_call(0)*c.columns+column;
        for (Int i = 0; i < nq; i++) to[i*c.columns] = w[i]*by[i];
    }

    // ---- gradients

    // What comes back to each row: dO, log of the sum or threshold (inf: takes no part), and
    // mean = dO·O.
    void read_rows(real *lse, real *mean) {
        memset(dout_rows, 0, QUERIES*p.dv_width*sizeof(real));
        std::fill(lse, lse+QUERIES, INFINITY);
        std::fill(mean, mean+QUERIES, 0);
        for (Int i = 0; i < nq; i++) {
            const real of_row = ((const real*)c.lse)[in_call(i)];
            if (of_row != of_row) guard.lose(i, q_rows+i*p.width, p.width);
            else lse[i] = of_row;
            if (guard.lost[i]) continue;                       // it sends nothing back
            real *back = dout_rows+i*p.dv_width;
            read_row(back, place(g->dout, i), c.dv, g->dout.e, c.kind);
            if (c.alpha.data) continue;                        // bits are kept, not the output
            const real *o = (const real*)place(c.out, i);
            if (c.kept) o = (const real*)c.kept+in_call(i)*c.dv;
            mean[i] = L::dot(o, back, c.dv);
            if (g->dlse && lse[i] < INFINITY) mean[i] -= ((const real*)g->dlse)[in_call(i)];
        }
        if constexpr (T::exist) if (keys.tiled()) {
            T::columns(dout_pairs, dout_rows, p.dv_width, 1);
            T::pairs(dout_row_pairs, dout_rows, QUERIES, p.dv_width);
        }
        if (!keys.tiled()) L::turn(dout_cols, dout_rows, p.dv_width, 1);
        if (!guard.reads_keys()) n_spans = n_keys = 0;
    }
    void write_dq(Int of) {                                    // from so many keys
        if constexpr (T::exist)
            if (keys.tiled()) T::turn_back(dq_rows, dq_cols, p.width);
        if (!of) memset(dq_rows, 0, nq*p.width*sizeof(real));
        for (Int i = 0; i < nq; i++)
            write_row(place(g->dq, i), dq_rows+i*p.width, c.d, c.kind);
    }
    real *grad_rows(const Rows &x, Int key) {
        return (real*)x.data+head.b*x.b+head.hk*x.h+key*x.n;
    }
    // The last three products of the backward pass by tiles, from S and D.
    void tile_push_back(const Span &s, Int j0, Int n, bool more) {
        if constexpr (T::exist) {
            const Int whole = rounded(n, T::DEPTH);
            memset(S+n*QUERIES, 0, (whole-n)*QUERIES*sizeof(real));
            memset(D+n*QUERIES, 0, (whole-n)*QUERIES*sizeof(real));
            add_tiles(g->dv, S, dout_row_pairs, p.dv_width, j0, n);
            add_tiles(g->dk, D, q_row_pairs, p.width, j0, n);
            T::pairs(w_pairs, D, whole, QUERIES);
            const auto &x = keys.piece[s.piece];
            T::product({dq_cols, QUERIES}, x.k_across.right(j0-x.lo), {w_pairs, 2*QUERIES},
                       p.width, QUERIES, whole, more);
        }
    }
    // To gradients of keys j0..j0+n-1, or of values: rows of weights times pairs of rows. Behind
    // the last of them may be those of another thread.
    void add_tiles(const Rows &of, const real *weights, const uint16_t *pairs, Int width, Int j0,
                   Int n) {
        if constexpr (T::exist) {
            static_assert(QUERIES%T::DEPTH == 0, "whole tiles");
            const Int whole = n/T::ROWS*T::ROWS, row = 2*width;
            T::as_bf16(w_rows, weights, rounded(n, T::ROWS)*QUERIES);
            T::product({grad_rows(of, j0), of.n}, {w_rows, QUERIES}, {pairs, row}, whole, width,
                       QUERIES, true);
            if (whole == n) return;
            T::product({some_grads, width}, {w_rows+whole*QUERIES, QUERIES}, {pairs, row}, T::ROWS,
                       width, QUERIES, false);
            for (Int j = whole; j < n; j++) {
                real *x = grad_rows(of, j0+j), *y = some_grads+(j-whole)*width;
                for (Int e = 0; e < width; e += LANES) store(x+e, load(x+e)+load(y+e));
            }
        }
    }
    // The other products of the backward pass for keys j0..j0+n-1: dV += Pᵀ dO, dK += dSᵀ Q,
    // dQ += dS K.
    void push_back(const Span &s, Int j0, Int n, const real *weights, const real *ds, bool more) {
        if (keys.tiled()) return tile_push_back(s, j0, n, more);
        const Out dv = {grad_rows(g->dv, j0), g->dv.n}, dk = {grad_rows(g->dk, j0), g->dk.n};
        const Out dq = {dq_rows, p.width};
        product_apart(dv, {weights, QUERIES}, {dout_rows, p.dv_width}, n, p.dv_width, nq, true);
        product_apart(dk, {ds, QUERIES}, {q_rows, p.width}, n, p.width, nq, true);
        product_apart(dq, {ds, 1, QUERIES}, keys.k(s, j0), nq, p.width, n, more);
    }
    // The gradient of a window after the softmax, written over its factor (times that of dropout).
    void to_window(const Span &s, Int key, int v, real *f, vec grad) {
        if (!c.after || s.far) return;
        vec m = load(head.times+head.place(key-at)+v*LANES);
        store(f, m > 0 ? grad*load(f)/m : splat(0));
    }
    // Of a key whose gradients are row `j` of D and `factor`.
    void add_diagonals(const Span &s, Int key, Int j) {
        const bool by_window = g->dsigma || g->dtable;
        const Int first = head.place(key-at);
        const real *ds = D+j*QUERIES;
        if (s.far) {
            if (head.bias && g->drel_bias) for (int i = 0; i < nq; i++)
                head.found.rel_bias()[head.bias_place(key-at-i)] += ds[i];
            return;
        }
        if (c.after && by_window) head.add_diagonal(head.times_sums, first, factor+j*QUERIES);
        if (g->drel_bias || (!c.after && by_window)) head.add_diagonal(head.sums, first, ds);
    }
    // From gradients of scores to those of products of query and key: n rows of D.
    void to_products(Int n) {
        const real by = real(c.scale);
        for (Int i = 0; i < n*QUERIES; i += LANES) {
            vec x = load(D+i)*by;
            store(D+i, c.softcap > 0 ? x*load(bend+i) : x);
        }
    }
};

// ---- softmax ------------------------------------------------------------------------------------

template <class real, int QUERIES> struct Softmax : Block<real, QUERIES> {
    typedef real number;
    typedef Lanes<real, QUERIES> L;
    using typename L::vec;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat;
    typedef Block<real, QUERIES> Base;
    using Base::p; using Base::c; using Base::head; using Base::keys; using Base::nq;
    using Base::n_keys; using Base::o_rows; using Base::S; using Base::D; using Base::factor;
    using Base::each_run; using Base::scores; using Base::factors; using Base::multiply;
    using Base::mix; using Base::tile_mix; using Base::o_cols; using Base::write_out;
    using Base::show; using Base::read_rows; using Base::weight_grads; using Base::to_window;
    using Base::add_diagonals; using Base::to_products; using Base::push_back;
    using Base::write_dq;

    typedef Tiles<real, QUERIES> T;

    Softmax(const Problem<real> &problem, const Grads *grads) : Base(problem, grads) {
        auto lies = [](const Rows &x, Int d) { return x.e == 1 && d%LANES == 0; };
        keys.may_tile = c.kind == BF16 && T::pay(c.N);
        keys.may_lie = c.kind == BF16 && !grads && lies(c.k, c.d) && lies(c.v, c.dv);
    }

    void lay_out(Room &room, Int rows) {
        Base::lay_out(room);
        keys.lay_out(room, rows);
    }

    void forward() {
        vec top[GROUPS], sum[GROUPS];
        for (int v = 0; v < GROUPS; v++) {
            top[v] = splat(-std::numeric_limits<real>::max());
            sum[v] = vec{};
        }
        bool more = false;
        each_run([&](const Span &s, Int j0, Int n) {
            scores(s, j0, n, 0);
            alignas(64) real shrink[QUERIES];
            vec most[4][GROUPS];           // of four keys in a row: maxima wait for each other
            for (auto &x : most) for (int v = 0; v < GROUPS; v++) x[v] = top[v];
            for (Int j = 0; j < n; j += 4) UNROLL for (int i = 0; i < 4; i++)
                for (int v = 0; v*LANES < nq; v++)
                    most[i][v] = L::max(most[i][v], load(S+std::min(j+i, n-1)*QUERIES+v*LANES));
            for (int v = 0; v*LANES < nq; v++) {
                const vec even = L::max(most[0][v], most[2][v]);
                const vec odd = L::max(most[1][v], most[3][v]), high = L::max(even, odd);
                vec by = L::exp2(top[v]-high), all{};
                store(shrink+v*LANES, by);
                for (Int j = 0; j < n; j++) {
                    vec w = L::exp2(load(S+j*QUERIES+v*LANES)-high);
                    store(S+j*QUERIES+v*LANES, w);
                    all += w;
                }
                sum[v] = sum[v]*by+all;
                top[v] = high;
            }
            if (p.has_factors) {
                for (Int j = 0; j < n; j++) factors(s, j0+j, factor+j*QUERIES);
                multiply(S, factor, n);
            }
            if (keys.tiled()) {
                for (Int e = 0; more && e < p.dv_width; e++)
                    multiply(o_cols+e*QUERIES, shrink, 1);
                tile_mix(s, j0, n, more);
            } else {
                if (more) for (Int i = 0; i < nq; i++) {
                    real *o = o_rows+i*p.dv_width;
                    for (Int e = 0; e < p.dv_width; e += LANES) store(o+e, load(o+e)*shrink[i]);
                }
                mix(s, j0, n, S, more);
            }
            more = true;
        });
        if constexpr (T::exist)
            if (keys.tiled()) T::turn_back(o_rows, o_cols, p.dv_width);
        for (Int i = 0; i < nq && keys.way == keys.LYING; i++)
            L::gather(o_rows+i*p.dv_width, p.dv_width);
        real all[QUERIES], high[QUERIES], by[QUERIES];
        for (int v = 0; v < GROUPS; v++) {
            store(all+v*LANES, sum[v]);
            store(high+v*LANES, top[v]);
        }
        for (Int i = 0; i < nq; i++) by[i] = end_row(i, high[i], all[i]);
        if (c.weights) show_weights(top, by);
    }
    // Row i of the output, from its largest score and the sum of its exponentials below that;
    // returns what these are multiplied by.
    real end_row(Int i, real high, real sum) {
        const bool overflows = high == INFINITY, empty = !(sum > 0);
        if (overflows || empty) {
            write_out(i, 0, overflows ? NAN : INFINITY);
            return 0;
        }
        double lse = c.lse || c.sink.data ? high+std::log2((double)sum) : 0;
        real by = 1/sum;
        if (c.sink.data) {
            const double most = std::max(lse, (double)head.sink);
            lse = most+std::log2(std::exp2(lse-most)+std::exp2(head.sink-most));
            by = (real)std::exp2(high-lse);
        }
        write_out(i, by, (real)(lse*M_LN2));
        return by;
    }
    // The scores are computed once more: the sum of a row comes after its last key.
    void show_weights(const vec *top, const real *by) {
        each_run([&](const Span &s, Int j0, Int n) {
            scores(s, j0, n, 0);
            for (Int j = 0; j < n; j++) {
                real *x = S+j*QUERIES;
                for (int v = 0; v < GROUPS; v++)
                    store(x+v*LANES, L::exp2(load(x+v*LANES)-top[v]));
                if (p.has_factors) {
                    factors(s, j0+j, factor);
                    multiply(x, factor, 1);
                }
                show(s, j0+j, x, by);
            }
        });
    }

    void backward() {
        real lse[QUERIES], mean[QUERIES];
        read_rows(lse, mean);
        for (int i = 0; i < QUERIES; i++) lse[i] *= real(M_LOG2E);
        bool more = false;
        each_run([&](const Span &s, Int j0, Int n) {
            scores(s, j0, n, 0);
            weight_grads(s, j0, n, D);
            for (Int j = 0; j < n; j++) {
                if (p.has_factors) factors(s, j0+j, factor+j*QUERIES);
                for (int v = 0; v < GROUPS; v++) {
                    const Int y = j*QUERIES+v*LANES;
                    vec w = L::exp2(load(S+y)-load(lse+v*LANES)), d = load(D+y);
                    if (p.has_factors) {
                        vec f = load(factor+y);
                        to_window(s, j0+j, v, factor+y, w*d);
                        d *= f;
                        store(S+y, w*f);
                    } else store(S+y, w);
                    store(D+y, w*(d-load(mean+v*LANES)));
                }
                add_diagonals(s, j0+j, j);
            }
            to_products(n);
            push_back(s, j0, n, S, D, more);
            more = true;
        });
        if (c.sink.data)
            for (Int i = 0; i < nq; i++)
                *head.found.sink() -= std::exp2(head.sink-lse[i])*mean[i];
        write_dq(n_keys);
    }
};

// ---- the newest query of every head, where tokens are written one by one ------------------------

// One query of a text, or one of each of several. The query heads of a key head read its keys and
// values together, a part of them at a time: they come from memory once, whatever the number of
// heads. Scores of a head lie side by side, so exponentials are vectors of keys. Parts are cut by
// the problem, never by the number of threads, and joined in their order. Where a number is not
// finite, nothing is written: rows are lost as `Guard` says, by the blocks.
template <class real> struct Newest : Softmax<real, SHORT> {
    typedef Softmax<real, SHORT> Base;
    typedef Lanes<real, SHORT> L;
    using typename L::vec; using typename L::ivec;
    using L::LANES; using L::SHARING; using L::load; using L::store; using L::splat;
    using Base::p; using Base::c; using Base::head; using Base::keys; using Base::guard;
    using Base::row; using Base::at; using Base::spans; using Base::n_spans; using Base::q_cols;
    using Base::o_rows;

    enum { PART = 512, SPACE = PART+4*LANES };
    // What a head finds in a part: the largest score, the sum of exponentials below that, the sum
    // of its values. `numbers()` of them are stored.
    struct Found { real *high, *sum, *values; };
    struct Row {               // of a query head
        Span spans[2];                     // the keys of the part that it sees
        Int n_spans;
        real *query;                       // [width], multiplied
        real *scores;                      // [SPACE] of the keys of the part; then their weights
        Found found;
    };
    Row *rows;                 // [share]
    Int place[2];              // of the first key of a piece among those of the part

    const real limit;          // of scores

    Newest(const Problem<real> &problem, double limit)
        : Base(problem, nullptr),
          limit(std::min(limit, (double)std::numeric_limits<real>::max()/2)) {
        keys.may_tile = false;
    }
    static bool serves(const Problem<real> &p) {
        const Call &c = p.c;
        for (Int b = 0; b < c.B; b++) {
            if (p.texts(b) != c.N) return false;
            for (Int t = 0; t < c.N; t++) {
                const Text x = p.whole_text(b, t);
                if (x.q1-x.q0 != 1) return false;
            }
        }
        return c.N > 0 && c.H > 0 && !c.alpha.data && !c.weights && !p.has_factors;
    }
    void lay_out(Room &room) {
        Block<real, SHORT>::lay_out(room);
        keys.lay_out_keys(room, PART);
        rows = room.take<Row>(p.share);
        for (Int i = 0; i < p.share; i++) {
            real *query = room.take<real>(p.width), *scores = room.take<real>(SPACE);
            if (!room.start) continue;
            rows[i].query = query;
            rows[i].scores = scores;
        }
    }
    Int numbers() const { return LANES+p.dv_width; }
    Found found_at(real *x) const { return {x, x+1, x+LANES}; }

    // ---- which keys

    // Those that some head of key head `hk` sees in a text; their number.
    Int find(Int b, Int t, Int hk) {
        Reach reach = p.reaches[b*c.H+hk*p.share];
        for (Int i = 1; i < p.share; i++) {
            const Reach r = p.reaches[b*c.H+hk*p.share+i];
            reach = {std::max(reach.left, r.left), std::max(reach.right, r.right)};
        }
        Int q0 = 0, q1 = c.N, n = 0;
        keys.find(b, hk, t, reach, q0, q1);
        for (const auto &x : keys.piece) n += std::max<Int>(x.hi-x.lo, 0);
        return n;
    }
    // Of these, the ones of a part are laid ready.
    void cut(Int part) {
        Int from = part*PART, end = from+PART, next = 0;       // counted over both pieces
        for (int i = 0; i < 2; i++) {
            auto &x = keys.piece[i];
            const Int n = std::max<Int>(x.hi-x.lo, 0);
            const Int lo = std::min(std::max<Int>(from, 0), n);
            x.hi = x.lo+std::max(std::min(end, n), lo);
            x.lo += lo;
            place[i] = next;
            next += rounded(x.hi-x.lo, LANES);
            from -= n;
            end -= n;
        }
        keys.lay_ready();
    }
    Int place_of(const Span &s, Int key) const { return place[s.piece]+key-keys.piece[s.piece].lo; }

    // What the heads of a key head find in a part; whether all numbers are finite.
    bool read(Int b, Int t, Int hk, Int part, real *found) {
        find(b, t, hk);
        cut(part);
        for (Int i = 0; i < p.share; i++) {
            Row &x = rows[i];
            x.found = found_at(found+i*numbers());
            begin(b, hk*p.share+i);
            std::copy(spans, spans+n_spans, x.spans);
            x.n_spans = n_spans;
            memcpy(x.query, q_cols, p.width*sizeof(real));
            if (guard.lost[0]) return false;
        }
        each_run([&](const Span &s, Row *const *some, auto n) { multiply(s, some, n); });
        for (Int i = 0; i < p.share; i++) {
            head.choose(b, hk*p.share+i);
            if (!weigh(rows[i])) return false;
        }
        each_run([&](const Span &s, Row *const *some, auto n) { mix(s, some, n); });
        for (Int i = 0; i < p.share; i++) {
            real *values = rows[i].found.values;
            if (keys.way == keys.LYING) L::gather(values, p.dv_width);
            if (L::largest({values, p.dv_width}, 1, p.dv_width) == INFINITY) return false;
        }
        return true;
    }
    void begin(Int b, Int h) {                                 // a query, and what it sees
        head.choose(b, h);
        guard.begin_head(0, false);
        guard.begin_text(true);
        Base::begin(keys.text.q0, keys.text.q1);
    }
    // `work(keys, rows, number of them)`: what some rows see together, SHARING or fewer at a time.
    template <class F> void each_run(F &&work) {
        for (int piece = 0; piece < 2; piece++) {
            const Int end = keys.piece[piece].hi;
            for (Int lo = keys.piece[piece].lo, hi; lo < end; lo = hi) {
                hi = end;                                      // or where a row begins or ends
                each_span(piece, [&](Row &, const Span &s) {
                    if (s.lo > lo) hi = std::min(hi, s.lo);
                    if (s.hi > lo) hi = std::min(hi, s.hi);
                });
                const Span run = {lo, hi, false, piece, 0};
                Row *some[SHARING];
                int n = 0;
                each_span(piece, [&](Row &x, const Span &s) {
                    if (s.lo > lo || s.hi < hi) return;
                    some[n++] = &x;
                    if (n < SHARING) return;
                    work(run, some, std::integral_constant<int, SHARING>());
                    n = 0;
                });
                if (n >= 2) work(run, some, std::integral_constant<int, 2>());
                if (n%2) work(run, some+n-1, std::integral_constant<int, 1>());
            }
        }
    }
    template <class F> void each_span(int piece, F &&work) {
        for (Int i = 0; i < p.share; i++) for (Int x = 0; x < rows[i].n_spans; x++)
            if (rows[i].spans[x].piece == piece) work(rows[i], rows[i].spans[x]);
    }

    // ---- scores and weights

    template <class N> void multiply(const Span &run, Row *const *some, N) {
        const auto &x = keys.piece[run.piece];
        if (keys.way == keys.LYING) multiply<N::value>(x.k_rows.below(run.lo-x.lo), run, some);
        else multiply<N::value>(x.k.below(run.lo-x.lo), run, some);
    }
    template <int R, class Rows> void multiply(const Rows &k, const Span &run, Row *const *some) {
        const Int n = run.hi-run.lo;
        const real *queries[R];
        for (int i = 0; i < R; i++) queries[i] = some[i]->query;
        for (Int j = 0; j < n; j += LANES) {
            vec of_row[R];
            L::template key_products<R>(of_row, k.below(j), n-j, queries, p.width);
            for (int i = 0; i < R; i++) {
                real *to = some[i]->scores+place_of(run, run.lo+j);
                if (j+LANES <= n) store(to, of_row[i]);
                else memcpy(to, &of_row[i], (n-j)*sizeof(real));
            }
        }
    }
    // Scores of products, the largest of them, and weights below that; whether all numbers are
    // finite.
    bool weigh(const Row &x) {
        vec top = splat(-std::numeric_limits<real>::max()), sum{};
        const vec most = splat(limit*head.unit);
        ivec bad{};
        each_span_of(x, [&](const Span &s, Int n, Int end, real *to) {
            std::fill(to+n, to+end, 0);
            if (!s.far) curve(s);
            for (Int j = 0; j < n; j += LANES) {
                vec y = load(to+j);
                bad |= !((y <= most) & (y >= -most));
                if (c.softcap > 0) y = L::tanh(y)*real(c.softcap*head.unit);
                store(to+j, s.far ? y : y+added(s.lo+j));
            }
            for (Int j = 0; j < n && (keys.holes || (s.far && head.bias)); j++) {
                if (s.far && head.bias) to[j] += head.unit*head.bias_at(s.lo+j-at);
                if (keys.is_hole(s.lo+j)) to[j] = -INFINITY;
            }
            std::fill(to+n, to+end, -INFINITY);
            for (Int j = 0; j < n; j += LANES) {
                bad |= !(load(to+j) < splat(INFINITY));
                top = L::max(top, load(to+j));
            }
        });
        real high = top[0];
        for (int l = 1; l < LANES; l++) high = std::max(high, top[l]);
        each_span_of(x, [&](const Span &, Int n, Int, real *to) {
            for (Int j = 0; j < n; j += LANES) {
                const vec y = L::exp2(load(to+j)-high);
                sum += y;
                store(to+j, y);
            }
        });
        *x.found.high = high;
        *x.found.sum = L::total(sum);
        std::fill(x.found.values, x.found.values+p.dv_width, 0);
        return !L::any(bad);
    }
    template <class F> void each_span_of(const Row &x, F &&work) {
        for (Int i = 0; i < x.n_spans; i++) {
            const Span &s = x.spans[i];
            const Int n = s.hi-s.lo;
            work(s, n, rounded(n, LANES), x.scores+place_of(s, s.lo));
        }
    }
    // What the head adds at the offsets of a span, and of LANES keys from `key` on: places fall
    // where keys rise.
    void curve(const Span &s) {
        const Int first = head.place(s.hi-1-at)-LANES+1, last = head.place(s.lo-at);
        head.curve(first/LANES*LANES, std::min(rounded(last+1, LANES), head.length));
    }
    vec added(Int key) const {
        const vec x = load(head.near+head.place(key-at)-LANES+1);
        vec y;
        UNROLL for (int l = 0; l < LANES; l++) y[l] = x[LANES-1-l];
        return y;
    }

    // ---- values

    template <class N> void mix(const Span &run, Row *const *some, N) {
        const auto &x = keys.piece[run.piece];
        if (keys.way == keys.LYING) mix<N::value>(x.v_rows.below(run.lo-x.lo), run, some);
        else mix<N::value>(x.v.below(run.lo-x.lo), run, some);
    }
    template <int R, class Rows> void mix(const Rows &v, const Span &run, Row *const *some) {
        for (Int lo = run.lo; lo < run.hi; lo += KEYS) {
            const real *weights[R];
            real *to[R];
            for (int i = 0; i < R; i++) {
                weights[i] = some[i]->scores+place_of(run, lo);
                to[i] = some[i]->found.values;
            }
            const Int n = std::min<Int>(KEYS, run.hi-lo);
            L::template sums_of<R,1>(to, weights, v.below(lo-run.lo), n, p.dv_width, true);
        }
    }
    // The row of a head in a text, from what its parts found, `step` numbers apart.
    void write(Int b, Int t, Int h, real *found, Int parts, Int step) {
        head.choose(b, h);
        guard.lost[0] = false;
        row = p.whole_text(b, t).q0;
        real high = -std::numeric_limits<real>::max(), sum = 0;
        for (Int i = 0; i < parts; i++) high = std::max(high, *found_at(found+i*step).high);
        std::fill(o_rows, o_rows+p.dv_width, 0);
        for (Int i = 0; i < parts; i++) {
            const Found x = found_at(found+i*step);
            const vec by = L::exp2(splat(*x.high-high));
            sum += *x.sum*by[0];
            for (Int e = 0; e < p.dv_width; e += LANES)
                store(o_rows+e, load(o_rows+e)+load(x.values+e)*by);
        }
        Base::end_row(0, high, sum);
    }
};

// ---- entmax: the weights of `Solver` on the keys of the block -----------------------------------

// Live keys: those of the block that may have weight, by their rows of S, in order. What is kept of
// them is dense: entry i of the list has row i of S, D, `factor` and `bend`. The sink is row
// `n_keys`, and the last one.
template <class real> struct Entmax : Block<real, SHORT> {
    enum { QUERIES = SHORT };
    typedef real number;
    typedef Lanes<real, QUERIES> L;
    using typename L::vec; using typename L::In;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat;
    using L::product; using L::product_apart;
    typedef Block<real, QUERIES> Base;
    using Base::p; using Base::c; using Base::g; using Base::head; using Base::keys;
    using Base::guard; using Base::spans; using Base::n_spans; using Base::nq;
    using Base::n_keys; using Base::S; using Base::D; using Base::factor; using Base::o_rows;
    using Base::q_rows; using Base::dq_rows; using Base::dout_rows; using Base::dout_cols;
    using Base::most_keys; using Base::each_run; using Base::row_of; using Base::key_of;
    using Base::in_call; using Base::scores; using Base::products; using Base::finish;
    using Base::factors; using Base::multiply; using Base::write_out; using Base::show;
    using Base::read_rows; using Base::to_window; using Base::add_diagonals;
    using Base::to_products; using Base::grad_rows; using Base::write_dq;

    Solver<real, QUERIES> solver;
    int32_t *live;             // the list
    real *gathered, *summed;   // [KEYS][width] keys or values of a run of it; their gradients

    Entmax(const Problem<real> &problem, const Grads *grads) : Base(problem, grads) {}

    void lay_out(Room &room, Int rows) {
        Base::lay_out(room);
        const Int run = KEYS*std::max(p.width, p.dv_width);
        live = (int32_t*)room.take<real>(most_keys(p));
        gathered = room.take<real>(run);
        summed = room.take<real>(run);
        keys.lay_out(room, rows);
        solver.S = S;
        solver.live = live;
    }

    // ---- live keys

    const Span &span_of(Int row) const { return spans[n_spans > 1 && row >= spans[1].row]; }
    template <class F> INLINE void each_live(Int m, F &&work) {    // `work(span, key, i)`
        for (Int i = 0; i < m; i++) {
            const Span &s = span_of(live[i]);
            work(s, key_of(s, live[i]), i);
        }
    }
    template <class F> INLINE void live_runs(Int m, F &&work) {    // `work(first, keys)`
        for (Int i = 0; i < m; i += KEYS) work(i, std::min<Int>(KEYS, m-i));
    }
    bool neighbours(Int i, Int n) const {
        const Int first = live[i], last = live[i+n-1];
        return last-first == n-1 && &span_of(first) == &span_of(last);
    }
    // Keys or values of a run of the list: as they lie, or gathered, then `n` may grow to whole
    // fours.
    enum Which { OF_KEYS, OF_VALUES };
    In live_rows(Int i, Int &n, Which which) {
        auto row_at = [&](Int entry) {
            const Span &s = span_of(live[entry]);
            const Int key = key_of(s, live[entry]);
            return which == OF_KEYS ? keys.k(s, key) : keys.v(s, key);
        };
        if (neighbours(i, n)) return row_at(i);
        const Int width = which == OF_KEYS ? p.width : p.dv_width;
        for (Int j = 0; j < n; j++) {
            fetch(row_at(i+std::min(j+8, n-1)).p, width*sizeof(real));
            memcpy(gathered+j*width, row_at(i+j).p, width*sizeof(real));
        }
        for (; n%4; n++) memset(gathered+n*width, 0, width*sizeof(real));
        return {gathered, width};
    }
    // C (+)= A B into rows of gradients of a run of the list.
    void add_live(const Rows &to, Int width, Int i, Int n, const real *a, const real *b) {
        auto row_at = [&](Int entry) {
            return grad_rows(to, key_of(span_of(live[entry]), live[entry]));
        };
        if (neighbours(i, n))
            return product({row_at(i), to.n}, {a, QUERIES}, {b, width}, n, width, nq, true);
        product({summed, width}, {a, QUERIES}, {b, width}, rounded(n, 4), width, nq, false);
        for (Int j = 0; j < n; j++) {
            real *x = row_at(i+j), *y = summed+j*width;
            fetch(row_at(i+std::min(j+8, n-1)), width*sizeof(real));
            for (Int e = 0; e < width; e += LANES) store(x+e, load(x+e)+load(y+e));
        }
    }
    // One bit per key, or per so many that the bits of a block fit: the same number in both passes.
    uint8_t *kept_bits(int &keys_of_bit) const {
        keys_of_bit = 0;                                       // as a power of two
        while ((most_keys(p) >> keys_of_bit) >= 8*KEPT*nq) keys_of_bit++;
        return (uint8_t*)c.kept+in_call(0)*KEPT;
    }
    void keep_live(Int m) {
        int by;
        uint8_t *to = kept_bits(by);
        const bool all = guard.broken || m == n_keys;
        memset(to, all ? 0xff : 0, guard.broken ? KEPT : (most_keys(p) >> by)/8+1);
        if (!all) for (Int i = 0; i < m; i++) {
            const Int bit = live[i] >> by;
            to[bit/8] |= 1 << bit%8;
        }
    }
    Int read_live() {
        int by;
        const uint8_t *of = kept_bits(by);
        Int m = 0;
        for (Int i = 0; i << by < n_keys; i += 8)
            for (unsigned bits = guard.broken ? 255 : of[i/8]; bits; bits &= bits-1) {
                Int j = (i+__builtin_ctz(bits)) << by;
                const Int end = std::min(j+(Int(1) << by), n_keys);
                while (j < end) live[m++] = (int32_t)j++;
            }
        return m;
    }

    // ---- passes

    Int scores_and_best(vec *top, real *best) {
        Int groups = 0;
        for (int v = 0; v < GROUPS; v++) top[v] = splat(-std::numeric_limits<real>::max());
        each_run([&](const Span &s, Int j0, Int n) {
            const Int first = row_of(s, j0);
            scores(s, j0, n, first);
            groups = solver.add_best(S+first*QUERIES, n, best, groups, top);
        });
        return groups;
    }
    void forward() {
        vec top[GROUPS], a[GROUPS];
        real high[QUERIES], thresholds[QUERIES], seen[QUERIES], all[QUERIES];
        solver.eps = head.eps;
        Int groups = scores_and_best(top, D), n = n_keys;
        for (int v = 0; v < GROUPS; v++) store(seen+v*LANES, top[v]);
        if (c.sink.data) {                                     // one more key, without a value
            for (int v = 0; v < GROUPS; v++) {
                store(S+n_keys*QUERIES+v*LANES, splat(head.sink));
                top[v] = L::max(top[v], splat(head.sink));
            }
            n = n_keys+1;
        }
        for (int v = 0; v < GROUPS; v++) store(high+v*LANES, top[v]);
        for (int i = 0; i < QUERIES; i++)
            if (i >= nq || guard.lost[i]) high[i] = INFINITY;  // keeps no key alive
        for (int v = 0; v < GROUPS; v++) top[v] = load(high+v*LANES);
        Int m = solver.solve(n, D, groups, top, a, guard.broken);
        m -= m && live[m-1] == n_keys;
        if (p.has_factors) {
            each_live(m, [&](const Span &s, Int key, Int i) {
                factors(s, key, factor+i*QUERIES);
            });
            multiply(S, factor, m);
        }
        live_runs(m, [&](Int i, Int n) {
            Int rows = n;
            const In values = live_rows(i, rows, OF_VALUES);
            product({o_rows, p.dv_width}, {S+i*QUERIES, 1, QUERIES}, {values.p, values.row},
                    nq, p.dv_width, n, i > 0);
        });
        if (!m) memset(o_rows, 0, nq*p.dv_width*sizeof(real));
        if (c.kept) keep_live(m);
        for (int v = 0; v < GROUPS; v++) store(thresholds+v*LANES, top[v]+a[v]);
        for (Int i = 0; i < nq; i++) {
            const bool empty = !n_keys || seen[i] == -std::numeric_limits<real>::max();
            const bool lost = high[i] == INFINITY;
            all[i] = !empty;
            write_out(i, all[i], empty ? INFINITY : lost ? NAN : thresholds[i]);
        }
        if (c.weights) each_live(m, [&](const Span &s, Int key, Int i) {
            show(s, key, S+i*QUERIES, all);
        });
    }
    void backward() {
        real lse[QUERIES], mean[QUERIES];
        solver.eps = head.eps;
        read_rows(lse, mean);
        const Int m = read_live();
        live_runs(m, [&](Int i, Int n) {
            Int rows = n;
            const In some_keys = live_rows(i, rows, OF_KEYS);
            products({some_keys.p, some_keys.row}, rows, i);
            rows = n;
            const In values = live_rows(i, rows, OF_VALUES);
            product({D+i*QUERIES, QUERIES}, {values.p, values.row}, {dout_cols, QUERIES},
                    rows, QUERIES, p.dv_width, false);
        });
        each_live(m, [&](const Span &s, Int key, Int i) {
            finish(s, key, S+i*QUERIES, splat(1));
            if (p.has_factors) factors(s, key, factor+i*QUERIES);
        });
        if (c.sink.data) for (int i = m*QUERIES; i < (m+1)*QUERIES; i++) {
            S[i] = head.sink;
            D[i] = 0;
            if (p.has_factors) factor[i] = 1;
        }
        for (int v = 0; v < GROUPS; v++) pull(v, load(lse+v*LANES), m);
        each_live(m, [&](const Span &s, Int key, Int i) { add_diagonals(s, key, i); });
        to_products(m);
        live_runs(m, [&](Int i, Int n) {
            add_live(g->dv, p.dv_width, i, n, S+i*QUERIES, dout_rows);
            add_live(g->dk, p.width, i, n, D+i*QUERIES, q_rows);
            Int rows = n;
            const In some_keys = live_rows(i, rows, OF_KEYS);
            product({dq_rows, p.width}, {D+i*QUERIES, 1, QUERIES}, {some_keys.p, some_keys.row},
                    nq, p.width, n, i > 0);
        });
        write_dq(m);
    }
    // One group of lanes: scores to weights, gradients of weights to those of scores.
    void pull(int v, vec a, Int m) {
        const Int n = m+(c.sink.data ? 1 : 0);
        real *x = S+v*LANES, *d = D+v*LANES, *f = factor+v*LANES;
        vec w, s, sum{}, slopes{}, pulled{}, heights{};
        auto grad = [&](Int j) {
            vec y = load(d+j*QUERIES);
            return p.has_factors ? y*load(f+j*QUERIES) : y;
        };
        const bool wants_alpha = g->dalpha;
        for (Int j = 0; j < n; j++) {
            vec y = load(x+j*QUERIES)-a;
            solver.law(y, w, s);
            sum += w;
            slopes += s;
            pulled += s*grad(j);
            if (wants_alpha) heights += s > 0 ? s*y : s;
        }
        vec by = sum > 0 ? 1/(sum > 0 ? sum : splat(1)) : splat(0), dalpha{};
        vec divisor = slopes > 0 ? slopes : splat(1), mean = pulled/divisor;
        vec typical = splat(0);
        if (wants_alpha) typical = solver.typical_phi(heights/divisor*solver.eps);
        auto score_grad = [&](Int j) INLINED {                 // and the weight, in `w`
            vec t = (load(x+j*QUERIES)-a)*solver.eps;
            solver.law(load(x+j*QUERIES)-a, w, s);
            vec ds = s*(grad(j)-mean);
            if (wants_alpha) {
                t = t > -1 ? t : splat(0);
                dalpha -= ds*(solver.phi(t, L::log1p(t))-typical);
            }
            w *= by;
            return ds;
        };
        each_live(m, [&](const Span &span, Int key, Int j) {
            vec ds = score_grad(j);
            if (p.has_factors) {
                vec raw = w*load(d+j*QUERIES), times = load(f+j*QUERIES);
                to_window(span, key, v, f+j*QUERIES, raw);
                w *= times;
            }
            store(x+j*QUERIES, w);
            store(d+j*QUERIES, ds);
        });
        if (n > m) *head.found.sink() += L::total(score_grad(m));
        *head.found.alpha() += L::total(dalpha);
    }
};

// ---- a worker: rows of one head, or of the query heads of one key head --------------------------

// `Law` is `Softmax` or `Entmax`.
template <class Law> struct Worker {
    typedef typename Law::number real;
    const Problem<real> &p;
    Law law;

    // `rows` is the largest number of rows of a task.
    Worker(const Problem<real> &problem, const Grads *grads, Room &room, Int rows)
        : p(problem), law(p, grads) { law.lay_out(room, rows); }
    static Int bytes(const Problem<real> &p, Int rows) {
        Room none = {nullptr, 0};
        Worker(p, nullptr, none, rows);
        return none.used;
    }
    typedef typename Tiles<real, Law::BLOCK>::Sizes Sizes;
    void forward(Int b, Int h, Int first, Int end) {
        const Sizes while_it_runs(law.keys.may_tile);
        law.begin_head(b, h);
        each_block(b, first, end, [&] { law.forward(); });
    }
    void backward(Int b, Int key_head, Int first, Int end, double *sums, Int numbers) {
        const Sizes while_it_runs(law.keys.may_tile);
        for (Int i = 0; i < p.share; i++) {
            law.head.found = {sums+i*numbers, p.c.table_size};
            law.begin_head(b, key_head*p.share+i);
            each_block(b, first, end, [&] { law.backward(); });
            law.head.end();
        }
    }
    template <class F> void each_block(Int b, Int first, Int end, F &&work) {
        for (Int t = 0; t < p.texts(b); t++) {
            Int q0 = first, q1 = end;
            law.begin_text(t, q0, q1);
            for (Int i = q0; i < q1;) {
                i = law.begin(i, q1);
                work();
            }
        }
    }
};

// ---- entmax by rows -----------------------------------------------------------------------------

// Up to GROUPS rows of scores of one alpha, each along the lanes.
template <class real, int QUERIES> struct Lengthwise : Solver<real, QUERIES, true> {
    typedef Solver<real, QUERIES, true> L;
    using typename L::vec; using typename L::ivec;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat;
    using L::S; using L::live; using L::eps; using L::row_sum;
    const Int cols, n;                     // numbers and vectors of a row
    real *D;

    Lengthwise(Int columns, Room &room) : cols(columns), n((columns+LANES-1)/LANES) {
        S = room.take<real>(n*QUERIES);
        D = room.take<real>(n*QUERIES);
        live = room.take<int32_t>(n);
    }
    static Int bytes(Int columns) {
        Room none = {nullptr, 0};
        Lengthwise(columns, none);
        return none.used;
    }
    // Vector j of a row, which may end within it.
    vec take(const real *row, Int j, real beyond) const {
        if ((j+1)*LANES <= cols) return load(row+j*LANES);
        real x[LANES];
        for (int l = 0; l < LANES; l++) x[l] = j*LANES+l < cols ? row[j*LANES+l] : beyond;
        return load(x);
    }
    void put(real *row, Int j, vec x) const {
        if ((j+1)*LANES <= cols) store(row+j*LANES, x);
        else memcpy(row+j*LANES, &x, (cols-j*LANES)*sizeof(real));
    }
    void weights(const real *z, real *p, Int rows) {
        vec top[GROUPS], a[GROUPS];
        bool lost[GROUPS];                 // a row with NaN or +inf
        for (int v = 0; v < GROUPS; v++) {
            const real *row = z+std::min<Int>(v, rows-1)*cols;
            ivec bad{};
            for (Int j = 0; j < n; j++) {
                vec x = take(row, j, -INFINITY);
                bad |= !(x < splat(INFINITY));
                store(S+j*QUERIES+v*LANES, x);
            }
            lost[v] = L::any(bad);
            top[v] = splat(-std::numeric_limits<real>::max());
        }
        const Int groups = L::add_best(S, n, D, 0, top);
        for (int v = 0; v < GROUPS; v++) {
            top[v] = L::joined(top[v], [](vec a, vec b) { return L::max(a, b); });
            if (lost[v]) top[v] = splat(INFINITY);
        }
        const Int m = L::solve(n, D, groups, top, a, false);
        for (int v = 0; v < rows; v++) {
            real *row = p+v*cols;
            if (m < n || lost[v]) std::fill(row, row+cols, lost[v] ? NAN : 0);
            if (lost[v]) continue;
            for (Int j = 0; j < m; j++) put(row, live[j], load(S+j*QUERIES+v*LANES));
        }
    }
    // From weights, and the gradient of them, to that of the scores; what alpha gets is returned.
    real pull(const real *p, const real *g, real *dz) {
        vec sum{}, slopes{}, logs{}, dalpha{};
        Int m = 0;
        for (Int j = 0; j < n; j++) {
            vec w = take(p, j, 0);
            ivec some = w != 0;
            if (!L::any(some)) continue;
            vec s, y = some ? take(g, j, 0) : splat(0);
            vec log_w = L::log(w > 0 ? w : splat(1));
            if (eps == real(.5)) s = L::sqrt(w);
            else if (eps == 1) s = w > 0 ? splat(1) : w;
            else s = w > 0 ? w*L::template exp2<true>(log_w*(-eps*real(M_LOG2E))) : w;
            sum += s*y;
            slopes += s;
            logs += s*log_w;
            store(S+m*QUERIES, w);
            store(S+m*QUERIES+LANES, s);
            store(D+m*QUERIES, y);
            store(D+m*QUERIES+LANES, log_w);
            live[m++] = (int32_t)j;
        }
        slopes = row_sum(slopes);
        vec divisor = slopes > 0 ? slopes : splat(1), mean = row_sum(sum)/divisor;
        vec typical = L::typical_phi(L::expm1(row_sum(logs)/divisor*eps));
        if (m < n) std::fill(dz, dz+cols, 0);
        for (Int i = 0; i < m; i++) {
            vec w = load(S+i*QUERIES), s = load(S+i*QUERIES+LANES);
            vec ds = s*(load(D+i*QUERIES)-mean);
            ds = w != 0 ? ds : splat(0);
            vec l = load(D+i*QUERIES+LANES)*eps;
            dalpha -= ds*(L::phi(w > 0 ? w/s-1 : splat(0), l)-typical);
            put(dz, live[i], ds);
        }
        return L::total(dalpha);
    }
};

// ---- who does what ------------------------------------------------------------------------------

enum { WORTH_A_THREAD = 1 << 21, MULTIPLICATIONS_OF_A_TASK = 1 << 22 };

// Rows first..end-1 of a head (backward: of the heads of a key head), and the keys whose gradients
// it clears before.
struct Task {
    Int b, h, first, end;
    double cost;
    Int number, clear, cleared;
};

// Memory of a call. The last one is kept for whoever comes first; a call beside that allocates its
// own.
struct Memory {
    static std::atomic<char*> spare;
    enum { HEADER = 64, KEPT = 1 << 24 };
    char *block;
    explicit Memory(Int n) : block(spare.exchange(nullptr)) {
        if (block && size() >= n) return;
        free(block);
        block = (char*)aligned_alloc(64, rounded(n+HEADER, 4096));
        if (!block) throw std::bad_alloc();
        size() = rounded(n+HEADER, 4096)-HEADER;
    }
    ~Memory() {
        char *none = nullptr;
        if (size() > KEPT || !spare.compare_exchange_strong(none, block)) free(block);
    }
    Int &size() { return *(Int*)block; }
    char *data() { return block+HEADER; }
};
std::atomic<char*> Memory::spare(nullptr);

// `work(task, thread)` for all tasks, the next one by whichever thread is free: those of the team,
// or some that live as long as the call.
template <class F> void run(Int tasks, Int threads, Team *team, F &&work) {
    std::atomic<Int> next(0), number(0);
    auto loop = [&](Int thread) { for (Int t; (t = next++) < tasks;) work(t, thread); };
    if (threads > 1 && team) {
        auto member = [&] {
            const Int thread = number++;
            if (thread < threads) loop(thread);
        };
        auto call = [](void *x) { (*(decltype(member)*)x)(); };
        return team(call, &member, (unsigned)threads, 0);
    }
    std::vector<std::thread> others;
    others.reserve(threads);
    try { for (Int i = 1; i < threads; i++) others.emplace_back(loop, i); }
    catch (const std::exception &) {}      // none to be had: those there are do the work
    loop(0);
    for (auto &t : others) t.join();
}
// The number of threads worth starting; the dearest tasks come first.
Int threads_for(const Call &c, std::vector<Task> &tasks) {
    auto dearer = [](const Task &a, const Task &b) { return a.cost > b.cost; };
    double cost = 0;
    for (const Task &t : tasks) cost += t.cost;
    std::stable_sort(tasks.begin(), tasks.end(), dearer);
    const Int worth = (Int)(cost/WORTH_A_THREAD);
    return std::max<Int>(1, std::min({c.threads, (Int)tasks.size(), worth}));
}
// Rows of a task: work for about a tenth of a millisecond, or `least`, as a task copies and looks
// through its keys anew; cut by the problem, never by the number of threads.
template <class real> Int rows_of_task(const Problem<real> &p, Reach r, Int least) {
    const double of_a_row = double(r.left+r.right+SHORT)*(p.width+p.dv_width);
    const Int rows = Int(MULTIPLICATIONS_OF_A_TASK/of_a_row);
    return std::min(p.c.N, rounded(std::max(rows, least), TALL));
}

// Writes the output, where each head has one query in a text, and all numbers are finite and no
// score is above a limit; whether it did.
template <class real> bool write_newest(const Problem<real> &p, double limit) {
    const Call &c = p.c;
    if (!Newest<real>::serves(p)) return false;
    Newest<real> plans(p, limit);
    struct Heads { Int b, t, hk, first_task, parts; };         // of a key head, in a text
    std::vector<Heads> heads;
    std::vector<Task> tasks;               // each a part: `h` its place in `heads`, `first` its own
    for (Int b = 0; b < c.B; b++) for (Int t = 0; t < c.N; t++) for (Int hk = 0; hk < c.Hkv; hk++) {
        const Int n = plans.find(b, t, hk), parts = std::max<Int>(1, (n+plans.PART-1)/plans.PART);
        const Int own = heads.size(), before = tasks.size();
        for (Int i = 0; i < parts; i++) {
            const double keys = std::min<Int>(n-i*plans.PART, plans.PART)+SHORT;
            const double cost = keys*p.share*(p.width+p.dv_width);
            tasks.push_back({b, own, i, i+1, cost, before+i, 0, 0});
        }
        heads.push_back({b, t, hk, before, parts});
    }
    Room counted = {nullptr, 0};
    plans.lay_out(counted);
    const Int threads = threads_for(c, tasks), bytes = counted.used;
    const Int of_head = plans.numbers(), of_task = p.share*of_head;
    Memory memory(threads*bytes);
    std::vector<real> found(tasks.size()*of_task);
    std::atomic<bool> finite(true);
    run(tasks.size(), threads, c.team, [&](Int number, Int thread) {
        const Task &x = tasks[number];
        const Heads &own = heads[x.h];
        Room room = {memory.data()+thread*bytes, 0};
        Newest<real> newest(p, limit);
        newest.lay_out(room);
        real *to = found.data()+x.number*of_task;
        if (!newest.read(own.b, own.t, own.hk, x.first, to)) finite = false;
    });
    if (!finite) return false;
    Room room = {memory.data(), 0};
    plans.lay_out(room);
    for (const Heads &x : heads) for (Int i = 0; i < p.share; i++) {
        real *from = found.data()+x.first_task*of_task+i*of_head;
        plans.write(x.b, x.t, x.hk*p.share+i, from, x.parts, of_task);
    }
    return true;
}

template <class Law> void forward(const Call &c) {
    typedef Worker<Law> W;
    const Problem<typename Law::number> p(c);
    if (write_newest(p, INFINITY)) return;
    std::vector<Task> tasks;
    Int most = 1;                          // rows of a task
    for (Int b = 0; b < c.B; b++) for (Int h = 0; h < c.H; h++) {
        const Reach r = p.reaches[b*c.H+h];
        const Int least = std::max<Int>(512, std::min(c.M, r.left+r.right)/8);
        const Int rows = std::max<Int>(rows_of_task(p, r, least), 1);
        most = std::max(most, rows);
        for (Int i = 0; i < c.N; i += rows) {
            const Int end = std::min(i+rows, c.N);
            const double cost = double(end-i)*(r.left+r.right+SHORT)*(p.width+p.dv_width);
            tasks.push_back({b, h, i, end, cost, 0, 0, 0});
        }
    }
    const Int threads = threads_for(c, tasks), bytes = W::bytes(p, most);
    Memory memory(threads*bytes);
    run(tasks.size(), threads, c.team, [&](Int t, Int thread) {
        const Task &x = tasks[t];
        Room room = {memory.data()+thread*bytes, 0};
        W(p, nullptr, room, most).forward(x.b, x.h, x.first, x.end);
    });
}

// Gradients of keys are sums over queries. Rows are cut into chunks longer than a window, and even
// chunks come before odd ones: no two at a time have a key in common, and every sum has one order.
template <class Law> void backward(const Call &c, const Grads &g) {
    typedef typename Law::number real;
    typedef Worker<Law> W;
    const Problem<real> p(c);
    const Int bias_size = c.rel_bias.data ? 2*c.bias_reach+1 : 0;
    const Int numbers = Sums::numbers(c.table_size, bias_size);
    std::vector<Task> tasks[2];            // of the even chunks, of the odd ones
    std::vector<Int> key_head;             // of a task, by its number
    Int most = 1;                          // rows of a task
    for (Int b = 0; b < c.B; b++) for (Int hk = 0; hk < c.Hkv; hk++) {
        Reach r = {0, 0};
        double pairs = 0;
        for (Int h = hk*p.share; h < (hk+1)*p.share; h++) {
            const Reach x = p.reaches[b*c.H+h];
            r = {std::max(r.left, x.left), std::max(r.right, x.right)};
            pairs += x.left+x.right+Law::BLOCK;
        }
        Int rows = rows_of_task(p, r, r.left+r.right+4);
        if (c.n_global || 2*rows > c.N) rows = c.N;
        rows = std::max<Int>(rows, 1);
        most = std::max(most, rows);
        const Int chunks = std::max<Int>(1, (c.N+rows-1)/rows);
        auto start = [&](Int i) {
            return i == 0 ? 0 : i >= chunks ? c.M : p.first_key(b, i*rows, r.left);
        };
        for (Int i = 0; i < chunks; i++) {
            const Int first = i*rows, end = std::min(first+rows, c.N);
            const Int clear = start(i), cleared = i%2 ? clear : start(i+2);
            const double cost = (end-first)*pairs*(p.width+p.dv_width)*3.5;
            const Int number = key_head.size();
            tasks[i%2].push_back({b, hk, first, end, cost, number, clear, cleared});
            key_head.push_back(b*c.Hkv+hk);
        }
    }
    const Int own = p.share*numbers;
    std::vector<double> found(key_head.size()*own), all(c.B*c.H*numbers);
    const Int bytes = W::bytes(p, most);
    for (auto &some : tasks) {
        if (some.empty()) continue;
        const Int threads = threads_for(c, some);
        Memory memory(threads*bytes);
        run(some.size(), threads, c.team, [&](Int t, Int thread) {
            const Task &x = some[t];
            for (Int j = x.clear; j < x.cleared; j++) {
                real *dk = (real*)g.dk.data+x.b*g.dk.b+x.h*g.dk.h+j*g.dk.n;
                real *dv = (real*)g.dv.data+x.b*g.dv.b+x.h*g.dv.h+j*g.dv.n;
                memset(dk, 0, p.width*sizeof(real));
                memset(dv, 0, p.dv_width*sizeof(real));
            }
            Room room = {memory.data()+thread*bytes, 0};
            double *sums = found.data()+x.number*own;
            W(p, &g, room, most).backward(x.b, x.h, x.first, x.end, sums, numbers);
        });
    }
    for (Int t = 0; t < (Int)key_head.size(); t++)             // sums of the tasks, in their order
        for (Int y = 0; y < own; y++) all[key_head[t]*own+y] += found[t*own+y];
    auto write = [&](void *to, double *(Sums::*field)() const, Int n) {
        for (Int x = 0; to && x < c.B*c.H; x++) {
            const Sums of_head = {all.data()+x*numbers, c.table_size};
            for (Int y = 0; y < n; y++) ((real*)to)[x*n+y] = (real)(of_head.*field)()[y];
        }
    };
    write(g.dsigma, &Sums::sigma, 1);
    write(g.dalpha, &Sums::alpha, 1);
    write(g.dsink, &Sums::sink, 1);
    write(g.dtable, &Sums::table, c.table_size);
    write(g.drel_bias, &Sums::rel_bias, bias_size);
}

// Rows of scores to weights; with a gradient `g` of weights `x`, to those of the scores and, row by
// row, of alpha.
template <class real> void entmax(const real *x, const real *g, const real *eps, real *out,
                                  real *dalpha, Int rows, Int cols, Int step, Int threads,
                                  Team *team) {
    typedef Lengthwise<real, 2*VECTOR/(int)sizeof(real)> W;
    const Int of_task = std::max<Int>(1, (1 << 16)/cols), tasks = (rows+of_task-1)/of_task;
    const Int bytes = W::bytes(cols);
    threads = std::max<Int>(1, std::min(threads, tasks/2));
    Memory memory(threads*bytes);
    run(tasks, threads, team, [&](Int t, Int thread) {
        Room room = {memory.data()+thread*bytes, 0};
        W worker(cols, room);
        const Int end = std::min((t+1)*of_task, rows);
        for (Int i = t*of_task, n = 1; i < end; i += n) {
            n = 1;
            worker.eps = eps[i*step];
            if (g) {
                const real of_alpha = worker.pull(x+i*cols, g+i*cols, out+i*cols);
                if (dalpha) dalpha[i] = of_alpha;
                continue;
            }
            while (n < W::GROUPS && i+n < end && eps[(i+n)*step] == worker.eps) n++;
            worker.weights(x+i*cols, out+i*cols, n);
        }
    });
}

// ---- what a caller asks first: how large its numbers are, what a mask of pairs says -------------

// Numbers looked at by their bits: without their signs they lie as unsigned numbers do, NaN on top.
template <class U> struct Bits;
template <> struct Bits<uint16_t> { typedef int16_t Signed; };
template <> struct Bits<uint32_t> { typedef int32_t Signed; };
template <> struct Bits<uint64_t> { typedef int64_t Signed; };

template <class U> U largest_bits(const U *x, Int n, Int step) {
    typedef typename Bits<U>::Signed S;
    constexpr S size = std::numeric_limits<S>::max();
    S most = 0;
    if (step == 1) for (Int i = 0; i < n; i++) most = std::max<S>(most, (S)x[i] & size);
    else for (Int i = 0; i < n; i++) most = std::max<S>(most, (S)x[i*step] & size);
    return (U)most;
}
double from_bits(uint64_t x, Int kind) {
    double y = kind == F64 ? bits<double>(x) : kind == F32 ? bits<float>((uint32_t)x) :
               kind == BF16 ? from_bf16((uint16_t)x) : from_f16((uint16_t)x);
    return y < INFINITY ? y : INFINITY;                        // NaN as well
}

// A tensor [B,H,N,d] as runs of numbers side by side: axes in the order of their strides, joined
// where they touch.
struct Runs {
    Int count = 1, length = 1, step = 0;       // runs; numbers of one, so far apart
    std::array<std::array<Int, 2>, 4> outer;   // size and stride of the axes that place a run
    int axes = 0;
    Runs(const Rows &x, Int B, Int H, Int N, Int d) {
        typedef std::array<Int, 2> Axis;
        std::array<Axis, 4> all = {{{B, x.b}, {H, x.h}, {N, x.n}, {d, x.e}}};
        std::sort(all.begin(), all.end(), [](const Axis &a, const Axis &b) { return a[1] < b[1]; });
        for (auto &axis : all) {
            if (axis[0] == 1 || axis[1] == 0) continue;        // an axis of one number, or repeated
            if (step == 0) step = axis[1], length = axis[0];
            else if (axes == 0 && axis[1] == step*length) length *= axis[0];
            else outer[axes++] = axis, count *= axis[0];
        }
        step = std::max<Int>(step, 1);
    }
    Int place(Int run) const {
        Int at = 0;
        for (int a = 0; a < axes; run /= outer[a][0], a++) at += run%outer[a][0]*outer[a][1];
        return at;
    }
};
template <class U> double largest_number(const Rows &x, Int B, Int H, Int N, Int d, const Call &c) {
    const Runs runs(x, B, H, N, d);
    const Int piece = 1 << 16, pieces = (runs.length+piece-1)/piece, all = runs.count*pieces;
    const Int together = std::max<Int>(1, piece/runs.length);  // pieces of a task
    const Int tasks = (all+together-1)/together, worth = runs.count*runs.length/piece/2;
    std::atomic<uint64_t> most(0);
    run(tasks, std::max<Int>(1, std::min(c.threads, worth)), c.team, [&](Int t, Int) {
        uint64_t own = 0;
        for (Int i = t*together; i < std::min((t+1)*together, all); i++) {
            const Int first = i%pieces*piece, n = std::min(piece, runs.length-first);
            const U *from = (const U*)x.data + runs.place(i/pieces) + first*runs.step;
            own = std::max<uint64_t>(own, largest_bits(from, n, runs.step));
        }
        for (uint64_t seen = most; seen < own && !most.compare_exchange_weak(seen, own);) {}
    });
    return from_bits(most, c.kind);
}
double largest_of(const Rows &x, Int B, Int H, Int N, Int d, const Call &c) {
    auto f = c.kind == F64 ? largest_number<uint64_t> :
             c.kind == F32 ? largest_number<uint32_t> : largest_number<uint16_t>;
    return f(x, B, H, N, d, c);
}

// A mask [B,H,N,M] of numbers that are 0 where a key is seen, else -infinity or far below 0.
struct Mask { const char *data; Int b, h, n, B, H, N, M, kind; };
// Seen are the keys of `keep` whose offset j - i lies from `low` to `high`, and where there are
// several texts, those of the query's text. All finite numbers that hide a key are `far` below 0,
// or further; 0 if there is none. The others say whether there is a row without a key, and a key
// that is hidden from all; `pairs` counts what is seen.
struct Seen { Int low, high, far, empty, holes, texts, pairs; };

template <class U> struct MaskReader {
    const Mask m;
    const U minus_infinity, far;               // as bits, which grow as a negative number falls
    struct Row { Int first, last, count; };    // keys that a row sees
    std::vector<Row> rows;                     // [B,N]
    std::atomic<bool> other{false};
    std::atomic<U> nearest;                    // to 0, of the numbers that hide

    MaskReader(const Mask &mask, U inf, U far)
        : m(mask), minus_infinity(inf), far(far), rows(m.B*m.N), nearest(inf) {}

    const U *row(Int b, Int h, Int i) const { return (const U*)m.data + b*m.b + h*m.h + i*m.n; }
    // Adds a row's keys to `keep`; `seen` is room for M of them.
    void read(Int b, Int i, uint8_t *keep, uint8_t *seen) {
        const U *x = row(b, 0, i);
        for (Int h = 1; h < m.H; h++)                          // all heads say the same
            if (memcmp(x, row(b, h, i), m.M*sizeof(U))) { other = true; return; }
        Int count = 0;
        for (Int j0 = 0; j0 < m.M; j0 += 1024) {
            const Int n = std::min<Int>(1024, m.M-j0);
            const U *y = x+j0;
            uint8_t *s = seen+j0, *k = keep+j0;
            const U low = minus_infinity, high = far;          // a byte that is written is neither
            U strange = 0, near = low;
            for (Int j = 0; j < n; j++) {
                const U zero = (U)(y[j] << 1) == 0;
                strange |= !(zero | ((y[j] >= high) & (y[j] <= low)));
                near = std::min(near, zero ? low : y[j]);
                s[j] = (uint8_t)zero;
            }
            if (strange) { other = true; return; }
            for (U seen = nearest; near < seen && !nearest.compare_exchange_weak(seen, near);) {}
            for (Int j = 0; j < n; j += 128) {
                uint8_t some = 0;
                for (Int i = j; i < std::min(j+128, n); i++) k[i] |= s[i], some += s[i];
                count += some;
            }
        }
        Row &r = rows[b*m.N+i];
        r = {0, -1, count};
        if (!count) return;
        r.first = (const uint8_t*)memchr(seen, 1, m.M)-seen;
        r.last = r.first+count-1;
        if (!memchr(seen+r.first, 0, count)) return;           // side by side
        for (r.last = m.M-1; !seen[r.last];) r.last--;
    }
    // `keep` [B,M] comes back, and the numbers of texts [B,N]; false where the mask says something
    // else.
    bool read_all(uint8_t *keep, Int *texts, Seen &found, Int threads, Team *team) {
        const Int of_task = std::max<Int>(8, (1 << 16)/m.M);    // rows
        const Int parts = (m.N+of_task-1)/of_task, tasks = m.B*parts;
        std::vector<uint8_t> room(tasks*m.M*2);
        auto place = [&](Int t) { return room.data()+t*m.M*2; };
        read(0, m.N-1, place(0), place(0)+m.M);    // most others show there what they are
        if (other || (m.N >= SOME*SOME && hides_between(place(0)))) return false;
        run(tasks, std::max<Int>(1, std::min(threads, tasks/2)), team, [&](Int t, Int) {
            const Int first = t%parts*of_task;
            for (Int i = first; i < std::min(first+of_task, m.N) && !other; i++)
                read(t/parts, i, place(t), place(t)+m.M);
        });
        if (other) return false;
        memset(keep, 0, m.B*m.M);
        for (Int t = 0; t < tasks; t++)
            for (Int j = 0; j < m.M; j++) keep[t/parts*m.M+j] |= place(t)[j];
        if (m.N == 1) return is_keys(keep, found);
        return is_band(keep, found) || are_texts(keep, found, texts);
    }
    // Whether one of some rows hides a key between two that it sees, which another of them sees:
    // no band does, so the others need not be read.
    enum { SOME = 8 };
    bool hides_between(uint8_t *keep) {
        for (Int x = 0; x < SOME && !other; x++) read(0, x*m.N/SOME, keep, keep+m.M);
        for (Int x = 0; x < SOME && !other; x++) {
            const Row &r = rows[x*m.N/SOME];
            Int known = 0;
            for (Int j = r.first; j <= r.last; j++) known += keep[j];
            if (known != r.count) return true;
        }
        return other;
    }
    Int distance() const {
        if (nearest == minus_infinity) return 0;
        const U sign = (U)1 << (8*sizeof(U)-1);
        return (Int)std::min(from_bits(nearest ^ sign, m.kind), 1e18);
    }
    bool is_keys(const uint8_t *keep, Seen &found) const {
        found = {-m.M, m.M, distance(), 0, memchr(keep, 0, m.B*m.M) != nullptr, 0, 0};
        for (Int b = 0; b < m.B; b++) found.empty |= rows[b].count == 0;
        return true;
    }
    // The narrowest band around all that is seen: nothing in it may be hidden but by `keep`, and
    // sums of `keep` count what a row would see.
    bool is_band(const uint8_t *keep, Seen &found) const {
        found = {m.M, -m.M-m.N, distance(), 0, 0, 0, 0};
        for (Int b = 0; b < m.B; b++) for (Int i = 0; i < m.N; i++) {
            const Row &r = rows[b*m.N+i];
            if (!r.count) { found.empty = 1; continue; }
            found.pairs += r.count;
            found.low = std::min(found.low, r.first-i);
            found.high = std::max(found.high, r.last-i);
        }
        if (found.low > found.high) return false;              // nothing is seen
        std::vector<Int> before(m.M+1);
        for (Int b = 0; b < m.B; b++) {
            for (Int j = 0; j < m.M; j++) before[j+1] = before[j]+keep[b*m.M+j];
            auto up_to = [&](Int j) { return before[std::min(std::max<Int>(j, 0), m.M)]; };
            for (Int i = 0; i < m.N; i++)
                if (rows[b*m.N+i].count != up_to(i+found.high+1)-up_to(i+found.low)) return false;
            const Int first = std::max<Int>(found.low, 0), end = std::min(m.N+found.high, m.M);
            found.holes |= up_to(end)-up_to(first) < end-first;
        }
        return true;
    }
    // Texts end to end, whose queries stand at their keys: a row of the mask is cut wherever no
    // pair reaches across, and in each piece the same band is seen, but for what `keep` hides.
    bool are_texts(const uint8_t *keep, Seen &found, Int *texts) {
        if (m.N > m.M || found.low > 0 || found.high < 0) return false;
        std::vector<Int> before(m.N+1), next(m.N);             // the first key from row i on
        for (Int b = 0; b < m.B; b++) {
            const Row *r = rows.data()+b*m.N;
            for (Int j = 0; j < m.N; j++) before[j+1] = before[j]+keep[b*m.M+j];
            Int first = m.M, last = -1, text = 0;
            for (Int i = m.N-1; i >= 0; i--)
                next[i] = first = std::min(first, r[i].count ? r[i].first : m.M);
            for (Int i = 0; i < m.N; i++) {
                text += i && last < i && next[i] >= i;
                texts[b*m.N+i] = text;
                last = std::max(last, r[i].last);
            }
            if (last >= m.N) return false;                     // keys behind all texts
            for (Int start = 0, end; start < m.N; start = end) {
                for (end = start+1; end < m.N && texts[b*m.N+end] == texts[b*m.N+start];) end++;
                for (Int i = start; i < end; i++) {
                    const Int lo = std::max(start, i+found.low), hi = std::min(end, i+found.high+1);
                    if (r[i].count != before[hi]-before[lo]) return false;
                }
            }
            found.holes |= before[m.N] < m.N;
            found.texts += text;
        }
        return found.texts > 0;                                // else it is no band, and one text
    }
};

}  // namespace

// ---- the interface ------------------------------------------------------------------------------

#define EXPORT extern "C" __attribute__((visibility("default")))
#ifndef SOURCE
#define SOURCE 0                           // built by hand: nothing is known of it
#endif

EXPORT Int dynattn_source() { return SOURCE; }   // a checksum of this file
EXPORT Int dynattn_vector() { return VECTOR; }
EXPORT bool dynattn_tiles() { return Tiles<float, TALL>::may_use; }
EXPORT Int dynattn_sizes(Int which) { return which ? sizeof(Grads) : sizeof(Call); }
EXPORT const char *dynattn_members(Int which) { return which ? members_of_Grads : members_of_Call; }
// Whether the work was done, which it is not where memory is lacking.
EXPORT bool dynattn_forward(const Call *c) {
    auto all = c->kind == F64 ? c->alpha.data ? forward<Entmax<double>>
                                              : forward<Softmax<double, SHORT>>
                              : c->alpha.data ? forward<Entmax<float>>
                              : c->kind == BF16 && Tiles<float, TALL>::pay(c->N)
                                              ? forward<Softmax<float, TALL>>
                                              : forward<Softmax<float, SHORT>>;
    try { all(*c); }
    catch (const std::bad_alloc &) { return false; }
    return true;
}
EXPORT bool dynattn_backward(const Call *c, const Grads *g) {
    auto all = c->kind == F64 ? c->alpha.data ? backward<Entmax<double>>
                                              : backward<Softmax<double, TALL>>
                              : c->alpha.data ? backward<Entmax<float>>
                                              : backward<Softmax<float, TALL>>;
    try { all(*c, *g); }
    catch (const std::bad_alloc &) { return false; }
    return true;
}

// The largest product of a query and a key that there may be, times the scale; infinity where a
// number of q, k, v or, if given, `dout` is not finite.
EXPORT double dynattn_largest_score(const Call *c, const Rows *dout) {
    const double q = largest_of(c->q, c->B, c->H, c->N, c->d, *c);
    const double k = largest_of(c->k, c->B, c->Hkv, c->M, c->d, *c);
    const double v = largest_of(c->v, c->B, c->Hkv, c->M, c->dv, *c);
    const double back = dout ? largest_of(*dout, c->B, c->H, c->N, c->dv, *c) : 0;
    const bool finite = q < INFINITY && k < INFINITY && v < INFINITY && back < INFINITY;
    return finite ? q*k*std::abs(c->scale)*c->d : INFINITY;
}
// The forward pass, where all numbers are finite and no score can be above a limit: 1; else 0, and
// nothing is written; -1 where memory is lacking. A query that sees all keys shows them itself.
EXPORT Int dynattn_forward_within(const Call *c, double limit) {
    const bool sees_all = c->left < 0 && c->right < 0 && !c->is_causal && !c->keep && !c->texts;
    if (c->N == 1 && sees_all && !c->sigma.data && !c->table.data) {
        try {
            return c->kind == F64 ? write_newest(Problem<double>(*c), limit)
                                  : write_newest(Problem<float>(*c), limit);
        }
        catch (const std::bad_alloc &) { return -1; }
    }
    if (!(dynattn_largest_score(c, nullptr) <= limit)) return 0;
    return dynattn_forward(c) ? 1 : -1;
}
// Whether a mask hides keys, or pairs outside a band or of two texts: 1 and 0; -1 where memory is
// lacking.
EXPORT Int dynattn_read_mask(const Mask *m, uint8_t *keep, Int *texts, Seen *found, Int threads,
                             Team *team) {
    auto read = [&](auto minus_infinity, auto far) {           // -8192 and below is far
        MaskReader<decltype(far)> reader(*m, minus_infinity, far);
        return reader.read_all(keep, texts, *found, threads, team);
    };
    try {
        if (m->kind == F64) return read(uint64_t(0xfff0000000000000), uint64_t(0xc0c0000000000000));
        if (m->kind == F32) return read(uint32_t(0xff800000), uint32_t(0xc6000000));
        if (m->kind == BF16) return read(uint16_t(0xff80), uint16_t(0xc600));
        return read(uint16_t(0xfc00), uint16_t(0xf000));
    }
    catch (const std::bad_alloc &) { return -1; }
}

EXPORT bool dynattn_entmax(const void *x, const void *g, const void *eps, void *out, void *dalpha,
                           Int rows, Int cols, Int step, Int kind, Int threads, Team *team) {
    auto all = [&](auto real) {
        typedef decltype(real) T;
        entmax((const T*)x, (const T*)g, (const T*)eps, (T*)out, (T*)dalpha, rows, cols, step,
               threads, team);
    };
    try { kind == F64 ? all(double()) : all(float()); }
    catch (const std::bad_alloc &) { return false; }
    return true;
}

// The pieces, for the tests of chapter 33.
EXPORT void dynattn_each(Int which, Int n, const float *x, float *y) {   // n is a multiple of LANES
    typedef Lanes<float, SHORT> L;
    for (Int i = 0; i < n; i += L::LANES) {
        auto v = L::load(x+i);
        L::store(y+i, which == 0 ? L::exp2(v) : which == 1 ? L::log(v) : which == 2 ? L::log1p(v) :
                      which == 3 ? L::expm1(v) : L::tanh(v));
    }
}
EXPORT void dynattn_product(float *c, const float *a, const float *b, Int rows, Int cols,
                            Int depth) {
    Lanes<float, SHORT>::product({c, cols}, {a, depth}, {b, cols}, rows, cols, depth, false);
}
EXPORT void dynattn_turn(float *columns, const float *rows, Int d) {
    Lanes<float, SHORT>::turn(columns, rows, d, 1);
}
