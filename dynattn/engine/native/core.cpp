// Attention inside a window on a CPU: softmax or entmax, forward and backward, one file without dependencies.
//
// Sixteen queries lie side by side in the vector lanes, and scores are kept as S[key][query]. So
//   - every product is one micro-kernel, C[r][:] += sum_k A[r,k] B[k][:], which reads keys and values as they lie;
//   - a window by offset is one unaligned load per key, from a vector made once per head;
//   - softmax and entmax need no sum across lanes, and sums along diagonals are aligned additions.
//
// The file is compiled once for each instruction set; the width of a vector follows from the compiler's flags.
// It trusts its caller: shapes, strides and dtypes are checked in Python, in one place.

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

typedef int64_t Int;

#if defined(__AVX512F__)
enum { VECTOR = 64 };  // bytes
#elif defined(__AVX2__)
enum { VECTOR = 32 };
#else
enum { VECTOR = 16 };
#endif

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// ---- what the caller hands over -----------------------------------------------------------------------------------

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

// A record that Python fills: a struct, and the text of its members. Python knows them from its own table of fields, and
// loads no library whose text says something else.
#define RECORD(name, ...) struct name { __VA_ARGS__ }; const char members_of_##name[] = #__VA_ARGS__

RECORD(Call,
    double scale, softcap, dropout_p, T, p; // `Plan` of chapter 20, in its order
    Int left, right, q_offset, n_global, table_first, is_causal, return_lse, after, fraction;
    Rows q, k, v, out;
    PerHead sigma, table, alpha, rel_bias, sink;
    void *kept;                            // softmax: [B,H,N,dv] `real`, the output unrounded, or null where `out` is;
                                           // entmax: [B,H,N,KEPT] bytes, bits of the live keys of each block
    void *lse;                             // [B,H,N] `real`: log of the row's sum, or threshold; inf: no key, nan: lost; or null
    void *weights;                         // [B,H,N,columns] `real`, zeros: leading keys, those from `first_key` on; or null
    const uint8_t *keep;                   // [B,M], 0 where a key takes no part; or null
    const Int *texts, *text_of;            // [T][5] a text's first and end query, first and end key, and shift; [B+1] its row's
    const Int *heads;                      // [B*Hkv][3] addresses of keys and values, position of row 0: of a cache
    const Int *origins;                    // [B] position of the first leading token: of a cache
    Team *team;                            // calls a function on several threads, as OpenMP's `GOMP_parallel`; or null
    Int B, H, Hkv, N, M, d, dv, kind;      // the kind of q, k, v and out
    Int first_key, columns;                // of `weights`
    Int table_size, bias_reach;            // the table's offsets j - i: table_first and on; R of a bias of 2R + 1 numbers
    Int seed, threads;
);

RECORD(Grads,
    Rows dout, dq, dk, dv;                 // dk and dv: `real`, contiguous rows of whole vectors
    void *dsigma, *dtable, *dalpha, *drel_bias, *dsink; // [B,H,...] `real`, or null
    const void *dlse;                      // [B,H,N] `real`, what comes back to `lse`; or null
);

namespace {

// ---- numbers ------------------------------------------------------------------------------------------------------

template <class real> struct Constants;
template <> struct Constants<float> {
    typedef int32_t integer;
    static constexpr int MANTISSA = 23, EXP_TERMS = 6, SERIES = 4, PSI_TERMS = 9, EXPM1_TERMS = 8;
    static constexpr float magic = 12582912.f, lowest = -125.f, highest = 126.f, converged = 2e-7f;
    static constexpr integer half_root = 0x3f3504f3;  // sqrt(1/2)
    // 2^r on [-1/2, 1/2], relative error 2^-24
    static constexpr float exp2[] = { 1.f, .6931471825f, .2402264476f, .5550347269e-1f, .9618384764e-2f,
        .1339262701e-2f, .1535920892e-3f };
};
template <> struct Constants<double> {
    typedef int64_t integer;
    static constexpr int MANTISSA = 52, EXP_TERMS = 13, SERIES = 11, PSI_TERMS = 16, EXPM1_TERMS = 15;
    static constexpr double magic = 6755399441055744., lowest = -1021., highest = 1022., converged = 1e-15;
    static constexpr integer half_root = 0x3fe6a09e667f3bcd;
    static constexpr double exp2[] = { 1., 6.931471805599453e-1, 2.402265069591007e-1, 5.550410866482158e-2,
        9.618129107628477e-3, 1.333355814642844e-3, 1.540353039338161e-4, 1.525273380405984e-5,
        1.321548679014431e-6, 1.017808600923970e-7, 7.054911620801123e-9, 4.445538271870811e-10,
        2.567843599348820e-11, 1.369148885390413e-12 };
};

constexpr double inverse_factorial(int k) { return k < 2 ? 1. : inverse_factorial(k-1)/k; }

// The same bits as another type.
template <class To, class From> To bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }

float from_bf16(uint16_t x) { return bits<float>((uint32_t)x << 16); }
uint16_t to_bf16(float f) {
    if (f != f) return 0x7fc0;
    uint32_t u = bits<uint32_t>(f);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
float from_f16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7fff) << 13;
    if (rest >= 0x0f800000) return bits<float>(sign | 0x7f800000 | rest);      // inf, nan
    return bits<float>(sign | bits<uint32_t>(bits<float>(rest)*0x1p112f));
}
uint16_t to_f16(float f) {
    uint32_t u = bits<uint32_t>(f), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    if (size > 0x7f800000) size = 0x7e00;                                      // nan
    else if (size >= 0x477ff000) size = 0x7c00;                                // from 65,520 on: inf
    else if (size < 0x38800000) size = bits<uint32_t>(bits<float>(size)+.5f) - 0x3f000000;  // subnormal: the sum rounds
    else size = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    return (uint16_t)(sign | size);
}

// The random number of a pair of query and key, from the call's seed: dropout is the same whoever computes it.
uint32_t mixed(uint32_t x) {
    x ^= x >> 16; x *= 0x7feb352du;
    x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ x >> 16;
}
uint32_t row_seed(Int seed, Int head, Int query) {
    uint32_t x = mixed((uint32_t)seed + 0x9e3779b9u);
    x = mixed(x ^ (uint32_t)((uint64_t)seed >> 32));
    x = mixed(x + (uint32_t)head*0x85ebca6bu);
    return mixed(x + (uint32_t)query*0xc2b2ae35u);
}
uint32_t pair_bits(uint32_t row, Int key) { return mixed(row + (uint32_t)key*0x9e3779b1u) >> 8; }

// Asks for memory that is read soon; it need not be there.
INLINE void fetch(const void *x, Int bytes) {
    for (Int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)x+i);
}

// ---- one row of queries -------------------------------------------------------------------------------------------

// Keys of a run; bytes per row for bits of live keys; queries of a block. Back through a softmax, each block reads and
// writes the gradients of its keys: with wide vectors, taller blocks pay.
enum { KEYS = 96, KEPT = 64, SHORT = 16, TALL = VECTOR >= 32 ? 32 : 16 };

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
    static constexpr int LANES = VECTOR/sizeof(real), GROUPS = QUERIES/LANES;

    static INLINE vec load(const real *p) { return *(const in_memory*)p; }
    static INLINE void store(real *p, vec x) { *(in_memory*)p = x; }
    static INLINE vec splat(real x) { return x - vec{}; }
    static INLINE vec max(vec a, vec b) { return a > b ? a : b; }
    static INLINE vec min(vec a, vec b) { return a < b ? a : b; }
    static INLINE bool any(ivec x) {                           // whether a comparison holds in some lane
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
    static INLINE vec sqrt(vec x) { UNROLL for (int l = 0; l < LANES; l++) x[l] = std::sqrt(x[l]); return x; }
    static INLINE real total(vec x) { real s = 0; for (int l = 0; l < LANES; l++) s += x[l]; return s; }

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
    // log w, where t is w - 1: for w near 1 the fraction f is t itself, so log1p(t) is right for small t too
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
        UNROLL for (int k = C::EXPM1_TERMS-1; k >= 1; k--) near = near*x + real(inverse_factorial(k));
        vec far = exp2<true>(x*real(M_LOG2E)) - 1;
        return (x < real(.5)) & (x > real(-.5)) ? near*x : far;
    }
    static INLINE vec tanh(vec x) {
        vec size = min(x < 0 ? -x : x, splat(20)), e = expm1(2*size), t = e/(e + 2);
        t = x < 0 ? -t : t;
        return x == x ? t : x;                                                 // NaN stays
    }

    // rows and lanes of a square exchanged
    template <int s, size_t... l> static INLINE void exchange(vec *r, std::index_sequence<l...>) {
        UNROLL for (int i = 0; i < LANES; i++) if (!(i & s)) {
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

    // ---- products ------------------------------------------------------------------------------------------------

    // R rows of C, each of V vectors, stay in registers while k runs
    template <int R, int V> static void micro(Matrix<real> c, Matrix<const real> a, Matrix<const real> b,
                                              Int depth, bool add) {
        vec x[R][V];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
            x[r][v] = add ? load(c.p+r*c.row+v*LANES) : vec{};
        for (Int k = 0; k < depth; k++, a.p += a.col, b.p += b.row) {
            vec y[V];
            UNROLL for (int v = 0; v < V; v++) y[v] = load(b.p+v*LANES);
            UNROLL for (int r = 0; r < R; r++) {
                vec z = splat(a.p[r*a.row]);
                UNROLL for (int v = 0; v < V; v++) x[r][v] += z*y[v];
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) store(c.p+r*c.row+v*LANES, x[r][v]);
    }
    // V vectors of each row
    template <int R, int V> static INLINE void panel(Matrix<real> c, Matrix<const real> a, Matrix<const real> b,
                                                     Int rows, Int depth, bool add) {
        Int r = 0;
        for (; r+R == rows || r+R+4 <= rows; r += R) micro<R,V>(c.below(r), a.below(r), b, depth, add);
        for (; r+4 <= rows; r += 4) micro<4,V>(c.below(r), a.below(r), b, depth, add);
        for (; r < rows; r++) micro<1,V>(c.below(r), a.below(r), b, depth, add);
    }
    // C[rows][cols] (+)= A[rows][depth] B[depth][cols]; cols is a multiple of LANES, rows of B and C are contiguous
    static void product(Matrix<real> c, Matrix<const real> a, Matrix<const real> b,
                        Int rows, Int cols, Int depth, bool add) {
        Int x = 0;
#if defined(__x86_64__) && !defined(__AVX512F__)                               // 16 registers; others have 32
        if (rows == 1 && cols%(8*LANES) == 0) {                                // rows of B as they lie in memory
            for (; x < cols; x += 8*LANES) micro<1,8>(c.right(x), a, b.right(x), depth, add);
            return;
        }
        for (; x+2*LANES <= cols; x += 2*LANES) panel<6,2>(c.right(x), a, b.right(x), rows, depth, add);
        for (; x < cols; x += LANES) panel<12,1>(c.right(x), a, b.right(x), rows, depth, add);
#else
        for (; x+4*LANES <= cols; x += 4*LANES) panel<6,4>(c.right(x), a, b.right(x), rows, depth, add);
        for (; x+2*LANES <= cols; x += 2*LANES) panel<12,2>(c.right(x), a, b.right(x), rows, depth, add);
        for (; x < cols; x += LANES) panel<8,1>(c.right(x), a, b.right(x), rows, depth, add);
#endif
    }
    // S[key][query] for one or a few queries: the width lies in the lanes, and LANES keys are summed at once
    static void few_scores(real *s, const real *k, Int kr, const real *q, Int keys, Int queries, Int width) {
        for (Int i = 0; i < queries; i++) for (Int j = 0; j < keys; j += LANES) {
            vec r[LANES];
            for (int l = 0; l < LANES; l++) {
                const real *row = k+std::min(j+l, keys-1)*kr;
                r[l] = load(q+i*width)*load(row);
                for (Int e = LANES; e < width; e += LANES) r[l] += load(q+i*width+e)*load(row+e);
            }
            transpose(r);
            UNROLL for (int half = LANES/2; half; half /= 2) UNROLL for (int l = 0; l < half; l++) r[l] += r[l+half];
            for (Int l = 0; l < std::min<Int>(LANES, keys-j); l++) s[(j+l)*QUERIES+i] = r[0][l];
        }
    }
    // the largest |x|; infinity where a number is not finite. Without their signs, numbers lie as their bits do, NaN on top
    static real largest(const real *x, Int stride, Int rows, Int cols) {
        constexpr integer size = std::numeric_limits<integer>::max();
        ivec most{};
        for (Int r = 0; r < rows; r++) for (Int e = 0; e < cols; e += LANES) {
            ivec y = (ivec)load(x+r*stride+e) & size;
            most = y > most ? y : most;
        }
        integer high = 0;
        for (int l = 0; l < LANES; l++) high = std::max(high, most[l]);
        return high < bits<integer>(std::numeric_limits<real>::infinity()) ? bits<real>(high) : INFINITY;
    }
};

// ---- reading and writing rows of any dtype ------------------------------------------------------------------------

template <class real> void read_row(real *to, const char *from, Int n, Int step, Int kind) {
    const uint16_t *x = (const uint16_t*)from;
    if (step == 1 && kind == (sizeof(real) == 4 ? F32 : F64)) memcpy(to, from, n*sizeof(real));
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
Int bytes_of(Int kind) { return kind == F64 ? 8 : kind == F32 ? 4 : 2; }

// ---- which keys a head sees ---------------------------------------------------------------------------------------

// Offsets j - p from -left to right, p the position of the query: those of the M keys only, so one side is negative where
// all keys stand on the other. At least -1 together, where no key is seen.
struct Reach { Int left, right; };

// Rows that attend to keys k0..k1-1; `origin` is position 0 of n_global. Row i stands at i + shift on the axis of the keys.
struct Text { Int q0, q1, k0, k1, origin, shift; };

Int rounded(Int n, Int to) { return (n > 0 ? n+to-1 : n)/to*to; }  // up

// What a task adds up for one head, in a row of numbers; the names are those of the fields that learn.
struct Sums {
    double *p;
    Int table_size;
    static Int numbers(Int table_size, Int bias_size) { return 3+table_size+bias_size; }
    double *sigma() const { return p; }
    double *alpha() const { return p+1; }
    double *sink() const { return p+2; }
    double *table() const { return p+3; }
    double *rel_bias() const { return table()+table_size; }
};

template <class real> struct Problem {
    const Call &c;
    static constexpr int LANES = VECTOR/sizeof(real);
    Int share, width, dv_width, reach_most;    // query heads of a key head; d and dv in whole vectors
    Int lead;                                  // leading keys that there are
    std::vector<Reach> reaches;                // [B,H]
    double level, steepness, norm, rate;       // of the default window, see `Head::curve`

    explicit Problem(const Call &call) : c(call), share(c.H/std::max<Int>(c.Hkv, 1)), width(rounded(c.d, LANES)),
                                         dv_width(rounded(c.dv, LANES)), reach_most(0),
                                         lead(std::min(c.n_global, c.M)), reaches(c.B*c.H),
                                         level(-std::log(c.T)), steepness(c.p*c.T/(1-c.T)), norm(1/std::tanh(c.p)),
                                         rate(std::sqrt(2*level)*(c.fraction ? std::max<Int>(c.M, 1)/2. : 1)) {
        for (Int b = 0; b < c.B; b++) for (Int h = 0; h < c.H; h++) {
            Reach r = reaches[b*c.H+h] = reach_of(b, h);
            reach_most = std::max(reach_most, r.left+r.right);
        }
    }
    const real *row(const PerHead &x, Int b, Int h) const {
        return x.data ? (const real*)x.data + b*x.b + h*x.h : nullptr;
    }
    Reach reach_of(Int b, Int h) const {
        Reach r = within_window(b, h), most = occurring(b);
        r.left = std::min(r.left, most.left);
        r.right = std::min(r.right, most.right);
        return {r.left, std::max(r.right, -r.left-1)};
    }
    // How far the queries of a row can look in their texts; nowhere, if there are none.
    Reach occurring(Int b) const {
        if (!c.texts) return {c.N-1+c.q_offset, c.M-1-c.q_offset};
        Reach most = {-1, 0};
        for (Int t = 0; t < texts(b); t++) {
            const Text x = whole_text(b, t);
            const Int left = x.q1-1+x.shift-x.k0, right = x.k1-1-x.q0-x.shift;
            most = t ? Reach{std::max(most.left, left), std::max(most.right, right)} : Reach{left, right};
        }
        return most;
    }
    Reach within_window(Int b, Int h) const {
        const Int far = Int(1) << 40;                          // further than any key stands from any query
        Int left = far, right = c.is_causal ? 0 : far;
        if (c.left >= 0) left = std::min(left, c.left);
        if (c.right >= 0) right = std::min(right, c.right);
        if (c.after) return {left, right};
        if (auto sigma = row(c.sigma, b, h)) {
            double w = std::ceil(*sigma*rate+1)-1;
            if (w < left) left = (Int)w;
            if (w < right) right = (Int)w;
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
    Text whole_text(Int b, Int t) const {                      // before keys that take no part are left out
        if (!c.texts) return {0, c.N, 0, c.M, c.origins ? c.origins[b] : 0, c.q_offset};
        const Int *at = c.texts+5*(c.text_of[b]+t);
        return {at[0], at[1], at[2], at[3], at[2], at[4]};
    }
    // The first key that a row may see, and no row behind it sees an earlier one.
    Int first_key(Int b, Int row, Int left) const {
        Int t = 0;
        while (t+1 < texts(b) && whole_text(b, t+1).q0 <= row) t++;
        const Text x = whole_text(b, t);
        return std::max(x.k0, std::min(row+x.shift-left, x.k1));
    }
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

// ---- entmax: p = [1 + eps (score - a)]^(1/eps), with the threshold a for which a row sums to one ------------------

// Of QUERIES rows side by side, a score of each in S[key]; or `lengthwise`, of GROUPS rows, LANES scores of each.
template <class real, int QUERIES, bool lengthwise = false> struct Solver : Lanes<real, QUERIES> {
    typedef Lanes<real, QUERIES> L;
    using typename L::vec; using typename L::ivec; using typename L::C;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat;

    enum { GROUP = lengthwise ? 4 : 16 };                      // vectors whose largest score bounds a threshold
    real *S, *live_room;
    real eps;                  // alpha - 1
    bool careful = false;      // a key or value is not finite, so one query at a time

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
        if (eps == real(.5)) s = t+1, w = s*s;
        else if (eps == 1) s = splat(1), w = t+1;
        else s = L::template exp2<true>(L::log1p(t)*(1/eps-1)*real(M_LOG2E)), w = s*(t+1);
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
    int32_t *live() const { return (int32_t*)live_room; }
    // The largest score of every group of keys is a part of the row, and its threshold a lower bound of the row's.
    Int add_best(const real *x, Int n, real *best, Int groups, vec *top) const {
        for (Int j = 0; j < n; j += GROUP, groups++) for (int v = 0; v < GROUPS; v++) {
            vec most = load(x+j*QUERIES+v*LANES);
            for (Int i = j+1; i < std::min<Int>(j+GROUP, n); i++) most = L::max(most, load(x+i*QUERIES+v*LANES));
            store(best+groups*QUERIES+v*LANES, most);
            top[v] = L::max(top[v], most);
        }
        return groups;
    }
    // Scores in S become weights of keys in the list, and `a` thresholds less the maxima. None is looked for to drop in
    // short rows and near softmax, where 0 times NaN has to be NaN, and where most keys have weight.
    Int solve(Int n, real *best, Int groups, const vec *top, vec *a) {
        for (int v = 0; v < GROUPS; v++) a[v] = vec{};
        const bool all = careful || n <= 4*GROUP || eps < real(.05) || bound(n, best, groups, top, a);
        Solver own = *this;                                    // which no store changes
        return all ? own.template solve_as<true>(n, best, top, a) : own.template solve_as<false>(n, best, top, a);
    }
    // Thresholds of the largest of every group, from below; whether most keys, of one from each group, have weight.
    bool bound(Int n, const real *best, Int groups, const vec *top, vec *a) const {
        for (int v = 0; v < GROUPS; v++) for (int i = 0; i < 4; i++) {
            vec sum{}, slopes{}, w, s;
            for (Int j = 0; j < groups; j++) {
                law(load(best+j*QUERIES+v*LANES)-top[v]-a[v], w, s);
                sum += w; slopes += s;
            }
            a[v] += L::max(newton(row_sum(sum), row_sum(slopes)), splat(0));
        }
        Int some = 0;
        for (Int j = 0; j < n; j += GROUP) {
            ivec in{};
            for (int v = 0; v < GROUPS; v++) in |= (load(S+j*QUERIES+v*LANES)-top[v]-a[v])*eps > -1;
            some += L::any(in);
        }
        return some*GROUP*4 > n*3;
    }
    // Those without weight fall out of the list at each of Newton's steps, and the last step changes the weights
    // themselves, by their slopes.
    template <bool all> INLINE Int solve_as(Int n, real *best, const vec *most, vec *a) {
        vec top[GROUPS], low[GROUPS];
        for (int v = 0; v < GROUPS; v++) top[v] = most[v], low[v] = a[v]-1/eps;
        Int m = 0;
        for (Int j = 0; j < n; j++) {
            ivec some{};
            for (int v = 0; v < GROUPS; v++) {
                vec x = load(S+j*QUERIES+v*LANES)-top[v];
                some |= x > low[v];
                store(S+m*QUERIES+v*LANES, x);
            }
            live()[m] = (int32_t)j;
            m += all || L::any(some);
        }
        // near the solution a step is as the square of the last one: up to alpha = 1.5, where the slope of the sum has
        // no kinks, the next is known, and it is the last step, if its square, which slopes leave out, is nothing. One
        // that hardly shrinks is rounding, and would not end.
        const real enough = eps <= real(.5) ? std::sqrt(C::converged)/4 : C::converged;
        vec last[GROUPS];
        for (int v = 0; v < GROUPS; v++) last[v] = splat(INFINITY);
        ivec more = splat(0) == splat(0);
        for (int i = 0; i < 60 && L::any(more); i++) {
            vec sum[GROUPS], slopes[GROUPS];
            for (int v = 0; v < GROUPS; v++) sum[v] = slopes[v] = vec{};
            Int left = 0;
            for (Int j = 0; j < m; j++) {
                ivec some{};
                for (int v = 0; v < GROUPS; v++) {
                    vec x = load(S+j*QUERIES+v*LANES), w, s;
                    law(x-a[v], w, s);
                    sum[v] += w; slopes[v] += s;
                    some |= w > 0;
                    if (left < j) store(S+left*QUERIES+v*LANES, x);
                }
                live()[left] = live()[j];
                left += all || L::any(some);
            }
            m = left;
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
            sum[v] += w; slopes[v] += s;
            store(S+j*QUERIES+v*LANES, w); store(slope+j*QUERIES+v*LANES, s);
        }
        for (int v = 0; v < GROUPS; v++) {
            vec of_row = row_sum(sum[v]), falls = row_sum(slopes[v]);
            by[v] = (of_row-1)/(falls > 0 ? falls : splat(1));
            a[v] += newton(of_row, falls);
        }
        Int left = 0;
        for (Int j = 0; j < m; j++) {
            ivec some{};
            for (int v = 0; v < GROUPS; v++) {
                vec w = L::max(load(S+j*QUERIES+v*LANES)-load(slope+j*QUERIES+v*LANES)*by[v], splat(0));
                some |= w > 0;
                store(S+left*QUERIES+v*LANES, w);
            }
            live()[left] = live()[j];
            left += all || L::any(some);
        }
        return left;
    }
    static constexpr auto psi_terms = [] {                     // of the series in `phi`
        std::array<real, C::PSI_TERMS+1> terms{};
        for (int k = 2; k <= C::PSI_TERMS; k++) terms[k] = real((k-1)*inverse_factorial(k));
        return terms;
    }();
    // The gradient of alpha is -sum of ds phi, phi = (l e^l - e^l + 1)/eps^2 with l = eps log p, so e^l = 1+t: a series
    // near 0. There 1/eps^2 may be infinite, which is not chosen.
    INLINE vec phi(vec t, vec l) const {
        const real by = 1/eps;
        vec series = splat(0), log_p = l*by;
        UNROLL for (int k = C::PSI_TERMS; k >= 2; k--) series = series*l + psi_terms[k];
        return l < real(-.5) ? ((l-1)*(t+1)+1)*(by*by) : log_p*log_p*series;
    }
    // The same at the mean `t` of a row under its slopes. The ds of a row sum to zero but for rounding, which a phi that
    // is large and alike for all keys would multiply; so phi counts from this one.
    INLINE vec typical_phi(vec t) const {
        t = L::max(t, splat(std::numeric_limits<real>::epsilon()-1));
        return phi(t, L::log1p(t));
    }
};

// ---- a worker: one thread's memory, and the head and the block it is at -------------------------------------------

// Keys lo..hi-1 of a piece, which begin at a row of S; far: without the window.
struct Span { Int lo, hi; bool far; Int piece, row; };

template <class real, int QUERIES> struct Worker : Solver<real, QUERIES> {
    typedef Solver<real, QUERIES> L;
    using typename L::vec; using typename L::ivec; using typename L::C;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat; using L::product;
    using L::S; using L::live_room; using L::eps; using L::careful; using L::law; using L::live;

    const Problem<real> &p;
    const Call &c;
    const Grads *g;
    char *memory;

    // buffers, see `lay_out`
    real *q_rows, *q_cols, *dout_rows, *dout_cols, *o_rows, *dq_rows, *D, *bend, *factor, *near, *times, *slope;
    real *sums, *times_sums, *gathered, *summed, *key_room;

    // the head
    Int b, h, hk, left, right, zero, length;
    const real *bias;
    real unit, sink;           // LOG2E for softmax, whose exponentials are powers of two, else 1
    bool entmax, has_factors;
    bool refused;              // alpha is no number from 1 to 2: all rows are NaN
    Sums found;                // of this task and head

    // the text, its keys in pieces (leading ones, the others), and the block
    Text text;
    bool holes;
    bool alone;                // one query: its scores and its output show such keys and values, which are read once
    bool checked;              // whether a score of the block may be no number
    real largest_key;
    struct Piece { const real *k, *v; Int kr, vr, lo, hi; } piece[2];
    Span spans[2];
    Int n_spans, n_keys, row, at, nq;  // first row of the block, its position, its number of queries
    bool lost[QUERIES];
    uint32_t seeds[QUERIES];   // of dropout

    Worker(const Problem<real> &problem, const Grads *grads, char *room)
        : p(problem), c(p.c), g(grads), memory(room), bias(nullptr), entmax(c.alpha.data),
          has_factors(c.after || c.dropout_p > 0) { lay_out(); }

    // ---- memory

    static Int strip(const Problem<real> &p) {   // keys of a block, at most
        const Call &c = p.c;
        Int n = c.n_global ? c.M : std::min(c.M, p.reach_most+QUERIES+4);
        return c.alpha.data ? n+p.lead+5 : std::min<Int>(n, KEYS);   // one more: the sink; and whole fours
    }
    template <class F> static void buffers(const Problem<real> &p, Int rows, F &&take) {
        const Call &c = p.c;
        Int by_offset = p.reach_most+6*QUERIES+4, block = strip(p)*QUERIES;
        bool extra = c.after || c.dropout_p > 0;
        take(&Worker::q_rows, QUERIES*p.width); take(&Worker::q_cols, QUERIES*p.width);
        take(&Worker::dout_rows, QUERIES*p.dv_width); take(&Worker::dout_cols, QUERIES*p.dv_width);
        take(&Worker::o_rows, QUERIES*p.dv_width); take(&Worker::dq_rows, QUERIES*p.width);
        take(&Worker::S, block); take(&Worker::D, block);
        take(&Worker::bend, c.softcap > 0 ? block : 0); take(&Worker::factor, extra ? block : 0);
        take(&Worker::near, by_offset); take(&Worker::times, by_offset); take(&Worker::slope, by_offset);
        take(&Worker::sums, by_offset*LANES); take(&Worker::times_sums, c.after ? by_offset*LANES : 0);
        Int run = c.alpha.data ? KEYS*std::max(p.width, p.dv_width) : 0;
        take(&Worker::live_room, c.alpha.data ? strip(p) : 0); take(&Worker::gathered, run); take(&Worker::summed, run);
        Int keys = c.n_global ? c.M : std::min(c.M, rows+p.reach_most);
        take(&Worker::key_room, copies_keys(p) ? (keys+p.lead)*(p.width+p.dv_width) : 0);
    }
    static Int room(const Problem<real> &p, Int rows) {
        Int n = 0;
        buffers(p, rows, [&](real *Worker::*, Int size) { n += rounded(size*(Int)sizeof(real), 64); });
        return n;
    }
    void lay_out() {                             // the last buffer is the only one whose size varies with the rows
        char *free = memory;
        buffers(p, c.N, [&](real *Worker::*x, Int size) {
            this->*x = (real*)free;
            free += rounded(size*(Int)sizeof(real), 64);
        });
    }
    // Whether rows are read where they lie. Far apart, they would miss the caches for each block anew.
    static bool direct(const Call &c, const Rows &x, Int d) {
        return c.kind == (sizeof(real) == 4 ? F32 : F64) && x.e == 1 && d%LANES == 0 && (x.n == d || c.N <= QUERIES);
    }
    static bool copies_keys(const Problem<real> &p) {
        return p.c.keep || !direct(p.c, p.c.k, p.c.d) || !direct(p.c, p.c.v, p.c.dv);
    }

    // ---- the head: vectors by offset

    void enter(Int batch, Int head, bool backward) {
        b = batch; h = head; hk = h/p.share;
        Reach r = p.reaches[b*c.H+h];
        left = r.left; right = r.right;
        zero = rounded(right+QUERIES+4, LANES);              // entry `zero + p - j` is that of offset j - p
        length = rounded(zero+left+2*QUERIES, LANES);
        unit = entmax ? 1 : real(M_LOG2E);
        eps = entmax ? std::max(*p.row(c.alpha, b, h)-1, real(0x1p-64)) : 0;
        refused = !(eps <= 1);
        bias = p.row(c.rel_bias, b, h);
        if (c.sink.data) sink = unit**p.row(c.sink, b, h);
        curve(backward);
    }
    // The window, its limits and the bias by offset. The default window is tanh(s expm1(z))/tanh(p) with
    // z = L (1 - y^2), y = |j - i|/edge, edge = rate sigma + 1, s the steepness.
    void curve(bool backward) {
        const real *sigma = p.row(c.sigma, b, h), *table = p.row(c.table, b, h);
        real edge = sigma ? *sigma*real(p.rate)+1 : 1, level = p.level, steep = p.steepness;
        vec ramp;
        for (int l = 0; l < LANES; l++) ramp[l] = l;
        for (Int x = 0; x < length; x += LANES) {
            vec at = real(x) + ramp, off = real(zero) - at, m = splat(0), d = splat(0);
            ivec in = (at <= real(zero+left)) & (at >= real(zero-right));
            if (sigma) {
                vec y = off/edge, z = L::max(level-level*y*y, splat(0)), e = L::expm1(z), t = L::tanh(steep*e);
                ivec some = in & (t*real(p.norm) >= std::numeric_limits<real>::min());
                if (backward) d = (1-t*t)*steep*(e+1)*(2*level)*y*y/edge*real(p.rate);
                if (c.after) m = t*real(p.norm), d *= real(p.norm);
                else m = L::log(some ? t*real(p.norm) : splat(1)), d /= t, in = some;
                d = some ? d : splat(0);
            } else if (table) for (int l = 0; l < LANES; l++) {
                Int t = zero-x-l-c.table_first;
                m[l] = t < 0 || t >= c.table_size ? c.after ? real(0) : -INFINITY : table[t];
            }
            store(slope+x, d);
            if (c.after) { store(times+x, m); m = splat(0); }
            if (bias) for (int l = 0; l < LANES; l++) m[l] += bias_at(zero-x-l);
            store(near+x, in ? m*unit : splat(-INFINITY));
        }
        for (Int x = length; x < length+LANES; x++) slope[x] = 0;
        if (!backward) return;
        memset(sums, 0, length*LANES*sizeof(real));
        if (c.after) memset(times_sums, 0, length*LANES*sizeof(real));
    }
    Int bias_place(Int offset) const { return std::min(std::max(offset, -c.bias_reach), c.bias_reach)+c.bias_reach; }
    real bias_at(Int offset) const { return bias[bias_place(offset)]; }

    // ---- the text: where its keys lie

    char *place(const Rows &x, Int head, Int i) const { return x.data+(b*x.b+head*x.h+i*x.n)*bytes_of(c.kind); }

    // Rows q0..q1-1 become those in text `t`, and its keys are laid ready.
    void begin(Int t, Int &q0, Int &q1) {
        text = p.text(b, t, holes);
        q0 = std::max(q0, text.q0); q1 = std::min(q1, text.q1);
        if (q0 >= q1) return;
        Int lead_end = std::max(text.k0, std::min(text.origin+c.n_global, text.k1));
        Int lo = std::max(lead_end, q0+text.shift-left), hi = std::min(text.k1, q1+text.shift+right);
        if (c.n_global && q0+text.shift < text.origin+c.n_global) lo = lead_end, hi = text.k1;
        set_piece(0, std::max(text.k0, text.origin), lead_end, text.origin);
        set_piece(1, lo, std::max(lo, hi), 0);
        careful = false; largest_key = 0;
        alone = q1-q0 == 1 && !g && !entmax;
        for (const Piece &x : piece) if (x.hi > x.lo && !alone) {
            largest_key = std::max(largest_key, L::largest(x.k, x.kr, x.hi-x.lo, p.width));
            careful |= L::largest(x.v, x.vr, x.hi-x.lo, p.dv_width) == INFINITY;
        }
        careful |= largest_key == INFINITY;
    }
    void set_piece(int i, Int lo, Int hi, Int lead) {
        Piece &x = piece[i];
        if (!c.n_global && !i) hi = lo;
        const char *k = place(c.k, hk, 0), *v = place(c.v, hk, 0);
        Int first = lo;
        if (c.heads) {
            const Int *own = c.heads+3*(b*c.Hkv+hk);
            k = (const char*)own[0]; v = (const char*)own[1];
            first = i ? lo-own[2] : lo-lead;
        }
        x.lo = lo; x.hi = hi;
        real *to = key_room+(i ? p.lead*(p.width+p.dv_width) : 0);
        x.k = rows_of(k, c.k, first, hi-lo, c.d, p.width, lo, to, x.kr);
        x.v = rows_of(v, c.v, first, hi-lo, c.dv, p.dv_width, lo, to+(hi-lo)*p.width, x.vr);
    }
    // Rows of keys or values as they lie, or copied: another dtype or stride, not whole vectors, or holes.
    const real *rows_of(const char *x, const Rows &like, Int first, Int n, Int d, Int width, Int key, real *to,
                        Int &stride) {
        if (!holes && direct(c, like, d)) { stride = like.n; return (const real*)x+first*like.n; }
        stride = width;
        for (Int j = 0; j < n; j++) {
            real *row = to+j*width;
            fetch(x+(first+j+8)*like.n*bytes_of(c.kind), d*bytes_of(c.kind));
            memset(row, 0, width*sizeof(real));
            if (holes && !c.keep[b*c.M+key+j]) continue;
            read_row(row, x+(first+j)*like.n*bytes_of(c.kind), d, like.e, c.kind);
        }
        return to;
    }

    // ---- the block: some queries and the keys they see

    // The rows from `i` on that see alike; the first row behind them.
    Int block(Int i, Int end) {
        row = i; at = i+text.shift;
        Int lead0 = text.origin, lead1 = c.n_global ? text.origin+c.n_global : lead0;
        bool is_global = at >= lead0 && at < lead1;
        Int stop = is_global ? lead1-text.shift : at < lead0 && c.n_global ? lead0-text.shift : end;
        if (entmax) stop = std::min(stop, i/QUERIES*QUERIES+QUERIES);   // both passes have the same blocks
        nq = careful ? 1 : std::min<Int>(QUERIES, std::min(stop, end)-i);
        n_spans = n_keys = 0;
        add_span(0, piece[0].lo, piece[0].hi, true);
        if (is_global) add_span(1, piece[1].lo, piece[1].hi, true);
        else {
            Int lo = std::max(piece[1].lo, at-left), hi = at+nq+right;
            if (!careful) hi = lo+rounded(std::max<Int>(hi-lo, 0), 4);       // whole rows of the micro-kernel
            add_span(1, lo, std::min(piece[1].hi, hi), false);
        }
        return i+nq;
    }
    void add_span(int i, Int lo, Int hi, bool far) {
        if (far && c.is_causal) hi = std::min(hi, at+nq);
        if (lo >= hi) return;
        spans[n_spans++] = {lo, hi, far, i, n_keys};
        n_keys += hi-lo;
    }
    // `work(span, first key, keys)` for the keys of the block, at most `KEYS` at a time.
    template <class F> INLINE void each_run(F &&work) {
        for (Int x = 0; x < n_spans; x++) for (Int j0 = spans[x].lo; j0 < spans[x].hi; j0 += KEYS)
            work(spans[x], j0, std::min<Int>(KEYS, spans[x].hi-j0));
    }
    static Int in_block(const Span &s, Int j) { return (s.row+j-s.lo)*QUERIES; }
    const real *keys(const Span &s, Int j) const { const Piece &x = piece[s.piece]; return x.k+(j-x.lo)*x.kr; }
    const real *values(const Span &s, Int j) const { const Piece &x = piece[s.piece]; return x.v+(j-x.lo)*x.vr; }
    bool is_hole(Int j) const { return holes && !c.keep[b*c.M+j]; }

    void read_queries() {
        memset(q_rows, 0, QUERIES*p.width*sizeof(real));
        real by = real(c.scale)*(c.softcap > 0 ? real(1/c.softcap) : unit);
        checked = careful;
        for (Int i = 0; i < nq; i++) {
            read_row(q_rows+i*p.width, place(c.q, h, row+i), c.d, c.q.e, c.kind);
            real most = L::largest(q_rows+i*p.width, 0, 1, p.width);
            lost[i] = refused || most == INFINITY;
            if (c.dropout_p > 0) seeds[i] = row_seed(c.seed, b*c.H+h, row+i);
            if (lost[i]) memset(q_rows+i*p.width, 0, p.width*sizeof(real));
            else checked |= !(std::max(most, std::abs(most*by))*largest_key*p.width < std::numeric_limits<real>::max());
        }
        if (nq > 2) L::turn(q_cols, q_rows, p.width, by);
        else for (Int e = 0; e < nq*p.width; e++) q_cols[e] = q_rows[e]*by;   // `few_scores` wants rows
    }
    // Scores of keys j0..j0+n-1 in `to`, [n][QUERIES], in units of the exponential: -inf where a query may not look.
    void scores(const Span &s, Int j0, Int n, real *to) {
        products(keys(s, j0), piece[s.piece].kr, n, to);
        for (Int j = 0; j < n; j++) finish(s, j0+j, to+j*QUERIES);
    }
    void products(const real *k, Int kr, Int n, real *to) {    // of keys and queries, and the soft cap
        if (nq > 2) product({to, QUERIES}, {k, kr}, {q_cols, QUERIES}, n, QUERIES, p.width, false);
        else {
            memset(to, 0, n*QUERIES*sizeof(real));
            L::few_scores(to, k, kr, q_cols, n, nq, p.width);
            for (Int j = 0; alone && j < n; j++) careful |= !(std::abs(to[j*QUERIES]) < INFINITY);
            checked |= careful;
        }
        if (c.softcap > 0) cap(to, bend+(to-S), n);
    }
    INLINE void finish(const Span &s, Int key, real *x) {      // the window, the bias, and who may look
        const real *m = near+zero+at-key;
        if (is_hole(key)) for (int v = 0; v < GROUPS; v++) store(x+v*LANES, splat(-INFINITY));
        else if (!s.far) for (int v = 0; v < GROUPS; v++) store(x+v*LANES, load(x+v*LANES)+load(m+v*LANES));
        else if (bias || c.is_causal) for (int i = 0; i < QUERIES; i++)
            x[i] = c.is_causal && key > at+i ? -INFINITY : bias ? x[i]+unit*bias_at(key-at-i) : x[i];
        if (checked) check(x, s, key);
    }
    // A score that is no number, or a key that is not finite: a query that sees the key is lost.
    void check(real *x, const Span &s, Int j) {
        bool broken = careful && L::largest(keys(s, j), 0, 1, p.width) == INFINITY;
        for (Int i = 0; i < nq; i++) {
            bool sees = !is_hole(j) && (!s.far ? near[zero+at-j+i] > -INFINITY :
                                        !(c.is_causal && j > at+i) && !(bias && bias_at(j-at-i) == -INFINITY));
            if (!sees) x[i] = -INFINITY;
            else if (broken || x[i] != x[i]) x[i] = 0, lost[i] = true;
        }
    }
    void cap(real *x, real *slopes, Int n) {   // c tanh(x/c); x/c came, and the derivative is kept
        for (Int i = 0; i < n*QUERIES; i += LANES) {
            vec t = L::tanh(load(x+i));
            store(x+i, t*real(c.softcap*unit));
            store(slopes+i, 1-t*t);
        }
    }
    // Factors of the weights of a key, [QUERIES]: a window after the softmax, dropout.
    void factors(const Span &s, Int key, real *x) {
        const uint32_t cut = (uint32_t)std::lround(c.dropout_p*0x1p24);
        const real kept = c.dropout_p < 1 ? real(1/(1-c.dropout_p)) : 0, *m = times+zero+at-key;
        for (int i = 0; i < QUERIES; i++) x[i] = c.after && !s.far ? m[i] : 1;
        if (c.dropout_p > 0) for (int i = 0; i < nq; i++) x[i] *= pair_bits(seeds[i], key) < cut ? 0 : kept;
    }
    void multiply(real *x, const real *by, Int n) {
        for (Int i = 0; i < n*QUERIES; i += LANES) store(x+i, load(x+i)*load(by+i));
    }
    // A row of the output: zero without a key, NaN where the query, or a score, was not finite.
    void write_out(Int i, real by, real lse) {
        real *o = o_rows+i*p.dv_width;
        bool empty = lse == INFINITY, gone = !empty && (lost[i] || lse != lse);
        if (empty || gone) std::fill(o, o+c.dv, gone ? NAN : 0);
        else for (Int e = 0; e < p.dv_width; e += LANES) store(o+e, load(o+e)*by);
        Int at = (b*c.H+h)*c.N+row+i;
        if (c.lse) ((real*)c.lse)[at] = gone ? NAN : lse;
        write_row(place(c.out, h, row+i), o, c.dv, c.kind);
        if (c.kept && !entmax) memcpy((real*)c.kept+at*c.dv, o, c.dv*sizeof(real));
    }
    // Weights of a key to where somebody looks at them, of each query `by` so much.
    void show(const Span &s, Int key, const real *w, const real *by) {
        Int at = s.piece ? key-c.first_key+p.lead : key;
        if (at >= c.columns || (s.piece && at < p.lead)) return;   // an edge that was rounded to a key
        real *to = (real*)c.weights+((b*c.H+h)*c.N+row)*c.columns+at;
        for (Int i = 0; i < nq; i++) to[i*c.columns] = w[i]*by[i];
    }
    // What comes back to each row: dO, log of the sum or threshold (inf: takes no part), and mean = dO·O.
    void read_rows(real *lse, real *mean) {
        memset(dout_rows, 0, QUERIES*p.dv_width*sizeof(real));
        for (int i = 0; i < QUERIES; i++) {
            Int at = (b*c.H+h)*c.N+row+i;
            lse[i] = i < nq ? ((const real*)c.lse)[at] : INFINITY;
            mean[i] = 0;
            if (i < nq && lse[i] != lse[i]) {                   // a row of NaN sends nothing back
                lse[i] = INFINITY; lost[i] = true;
                memset(q_rows+i*p.width, 0, p.width*sizeof(real));
            }
            if (i >= nq || lost[i]) continue;
            real *back = dout_rows+i*p.dv_width;
            read_row(back, place(g->dout, h, row+i), c.dv, g->dout.e, c.kind);
            if (entmax) continue;                               // and bits are kept, not the output
            const real *o = c.kept ? (const real*)c.kept+at*c.dv : (const real*)place(c.out, h, row+i);
            mean[i] = L::dot(o, back, c.dv);
            if (g->dlse && lse[i] < INFINITY) mean[i] -= ((const real*)g->dlse)[at];
        }
        L::turn(dout_cols, dout_rows, p.dv_width, 1);
        if (careful && lost[0]) n_spans = n_keys = 0;           // 0 times NaN is NaN: its keys are not even read
    }
    void write_dq(Int of) {                                    // from so many keys
        if (!of) memset(dq_rows, 0, nq*p.width*sizeof(real));
        for (Int i = 0; i < nq; i++) write_row(place(g->dq, h, row+i), dq_rows+i*p.width, c.d, c.kind);
    }
    real *grad_rows(const Rows &x, Int j) { return (real*)x.data+b*x.b+hk*x.h+j*x.n; }

    // O (+)= P V and dP = dO Vᵀ, for keys j0..j0+n-1.
    INLINE void mix(const Span &s, Int j0, Int n, const real *weights, bool more) {
        product({o_rows, p.dv_width}, {weights, 1, QUERIES}, {values(s, j0), piece[s.piece].vr}, nq, p.dv_width, n, more);
    }
    INLINE void weight_grads(const Span &s, Int j0, Int n, real *to) {
        product({to, QUERIES}, {values(s, j0), piece[s.piece].vr}, {dout_cols, QUERIES}, n, QUERIES, p.dv_width, false);
    }
    // The other products of the backward pass for keys j0..j0+n-1: dV += Pᵀ dO, dK += dSᵀ Q, dQ += dS K.
    void push_back(const Span &s, Int j0, Int n, const real *weights, const real *ds, bool more) {
        Matrix<real> dv = {grad_rows(g->dv, j0), g->dv.n}, dk = {grad_rows(g->dk, j0), g->dk.n};
        product(dv, {weights, QUERIES}, {dout_rows, p.dv_width}, n, p.dv_width, nq, true);
        product(dk, {ds, QUERIES}, {q_rows, p.width}, n, p.width, nq, true);
        product({dq_rows, p.width}, {ds, 1, QUERIES}, {keys(s, j0), piece[s.piece].kr}, nq, p.width, n, more);
    }
    // The gradient of a window after the softmax, written over its factor (times that of dropout).
    void to_window(const Span &s, Int key, int v, real *f, vec grad) {
        if (!c.after || s.far) return;
        vec m = load(times+zero+at-key+v*LANES);
        store(f, m > 0 ? grad*load(f)/m : splat(0));
    }
    void add_diagonals(const Span &s, Int key, Int at_row) {   // of the row of `D` and `factor` that begins there
        if (c.after && !s.far && (g->dsigma || g->dtable)) add_diagonal(times_sums, s, key, factor+at_row);
        if (g->drel_bias || (!c.after && (g->dsigma || g->dtable))) add_diagonal(sums, s, key, D+at_row);
    }
    // Sums along diagonals. A copy for each misalignment keeps the additions aligned: copy f%LANES, place f/LANES.
    void add_diagonal(real *to, const Span &s, Int key, const real *x) {
        if (s.far) {
            if (bias && g->drel_bias) for (int i = 0; i < nq; i++) found.rel_bias()[bias_place(key-at-i)] += x[i];
            return;
        }
        Int first = zero+at-key;
        real *sum = to+first%LANES*length+first/LANES*LANES;
        for (int v = 0; v < GROUPS; v++) store(sum+v*LANES, load(sum+v*LANES)+load(x+v*LANES));
    }

    // ---- softmax

    void softmax_forward() {
        vec top[GROUPS], sum[GROUPS];
        for (int v = 0; v < GROUPS; v++) top[v] = splat(-std::numeric_limits<real>::max()), sum[v] = vec{};
        bool more = false;
        each_run([&](const Span &s, Int j0, Int n) {
            scores(s, j0, n, S);
            vec high[GROUPS];
            real shrink[QUERIES];
            for (int v = 0; v*LANES < nq; v++) {
                high[v] = top[v];
                for (Int j = 0; j < n; j++) high[v] = L::max(high[v], load(S+j*QUERIES+v*LANES));
                vec by = L::exp2(top[v]-high[v]), all = sum[v]*by;
                store(shrink+v*LANES, by);
                for (Int j = 0; j < n; j++) {
                    vec w = L::exp2(load(S+j*QUERIES+v*LANES)-high[v]);
                    store(S+j*QUERIES+v*LANES, w);
                    all += w;
                }
                sum[v] = all; top[v] = high[v];
            }
            if (has_factors) {
                for (Int j = 0; j < n; j++) factors(s, j0+j, factor+j*QUERIES);
                multiply(S, factor, n);
            }
            if (more) for (Int i = 0; i < nq; i++) for (Int e = 0; e < p.dv_width; e += LANES)
                store(o_rows+i*p.dv_width+e, load(o_rows+i*p.dv_width+e)*shrink[i]);
            mix(s, j0, n, S, more);
            more = true;
        });
        real all[QUERIES], high[QUERIES], by[QUERIES];
        for (int v = 0; v < GROUPS; v++) store(all+v*LANES, sum[v]), store(high+v*LANES, top[v]);
        for (Int i = 0; i < nq; i++) {
            by[i] = 0;
            if (high[i] == INFINITY) { write_out(i, 0, NAN); continue; }
            if (!(all[i] > 0)) { write_out(i, 0, INFINITY); continue; }
            double lse = c.lse || c.sink.data ? high[i]+std::log2((double)all[i]) : 0;
            if (c.sink.data) {
                double most = std::max(lse, (double)sink);
                lse = most+std::log2(std::exp2(lse-most)+std::exp2(sink-most));
            }
            by[i] = c.sink.data ? (real)std::exp2(high[i]-lse) : 1/all[i];
            write_out(i, by[i], (real)(lse*M_LN2));
        }
        if (c.weights) each_run([&](const Span &s, Int j0, Int n) {
            scores(s, j0, n, S);
            for (Int j = 0; j < n; j++) {
                real *x = S+j*QUERIES;
                for (int v = 0; v < GROUPS; v++) store(x+v*LANES, L::exp2(load(x+v*LANES)-top[v]));
                if (has_factors) factors(s, j0+j, factor), multiply(x, factor, 1);
                show(s, j0+j, x, by);
            }
        });
    }
    void softmax_backward() {
        real lse[QUERIES], mean[QUERIES];
        read_rows(lse, mean);
        for (int i = 0; i < QUERIES; i++) lse[i] *= real(M_LOG2E);
        bool more = false;
        each_run([&](const Span &s, Int j0, Int n) {
            scores(s, j0, n, S);
            weight_grads(s, j0, n, D);
            for (Int j = 0; j < n; j++) {
                if (has_factors) factors(s, j0+j, factor+j*QUERIES);
                for (int v = 0; v < GROUPS; v++) {
                    Int y = j*QUERIES+v*LANES;
                    vec w = L::exp2(load(S+y)-load(lse+v*LANES)), d = load(D+y);
                    if (has_factors) {
                        vec f = load(factor+y);
                        to_window(s, j0+j, v, factor+y, w*d);
                        d *= f;
                        store(S+y, w*f);
                    } else store(S+y, w);
                    store(D+y, w*(d-load(mean+v*LANES)));
                }
                add_diagonals(s, j0+j, j*QUERIES);
            }
            to_products(D, n);
            push_back(s, j0, n, S, D, more);
            more = true;
        });
        if (c.sink.data) for (Int i = 0; i < nq; i++) *found.sink() -= std::exp2(sink-lse[i])*mean[i];
        write_dq(n_keys);
    }
    // From gradients of scores to those of products of query and key.
    void to_products(real *ds, Int n) {
        const real by = real(c.scale);
        const real *slopes = bend+(ds-D);
        for (Int i = 0; i < n*QUERIES; i += LANES) {
            vec x = load(ds+i)*by;
            store(ds+i, c.softcap > 0 ? x*load(slopes+i) : x);
        }
    }

    // ---- entmax: the weights of `Solver` on the keys of the block

    // Live keys: those of the block that may have weight, by their rows of S, in order. What is kept of them is dense:
    // entry i of the list has row i of S, D, `factor` and `bend`. The sink is row `n_keys`, and the last one.
    const Span &span_of(Int j) const { return spans[n_spans > 1 && j >= spans[1].row]; }
    static Int key_of(const Span &s, Int j) { return s.lo+j-s.row; }
    template <class F> INLINE void each_live(Int m, F &&work) {    // `work(span, key, i)`
        for (Int i = 0; i < m; i++) { const Span &s = span_of(live()[i]); work(s, key_of(s, live()[i]), i); }
    }
    template <class F> INLINE void live_runs(Int m, F &&work) {    // `work(first, keys)`
        for (Int i = 0; i < m; i += KEYS) work(i, std::min<Int>(KEYS, m-i));
    }
    bool neighbours(Int i, Int n) const {
        Int first = live()[i], last = live()[i+n-1];
        return last-first == n-1 && &span_of(first) == &span_of(last);
    }
    // Rows of keys or values of a run of the list: as they lie, or gathered, then `n` may grow to whole fours.
    const real *live_rows(Int i, Int &n, bool of_keys, Int &stride) {
        auto row_at = [&](Int j) { const Span &s = span_of(j); Int key = key_of(s, j); return of_keys ? keys(s, key) : values(s, key); };
        const Piece &x = piece[span_of(live()[i]).piece];
        stride = of_keys ? x.kr : x.vr;
        if (neighbours(i, n)) return row_at(live()[i]);
        stride = of_keys ? p.width : p.dv_width;
        for (Int j = 0; j < n; j++) {
            fetch(row_at(live()[i+std::min(j+8, n-1)]), stride*sizeof(real));
            memcpy(gathered+j*stride, row_at(live()[i+j]), stride*sizeof(real));
        }
        for (; n%4; n++) memset(gathered+n*stride, 0, stride*sizeof(real));
        return gathered;
    }
    // C (+)= A B into rows of gradients of a run of the list.
    void add_live(const Rows &to, Int width, Int i, Int n, const real *a, const real *b) {
        const Span &s = span_of(live()[i]);
        if (neighbours(i, n)) {
            real *x = grad_rows(to, key_of(s, live()[i]));
            return product({x, to.n}, {a, QUERIES}, {b, width}, n, width, nq, true);
        }
        product({summed, width}, {a, QUERIES}, {b, width}, rounded(n, 4), width, nq, false);
        auto row_at = [&](Int j) { return grad_rows(to, key_of(span_of(j), j)); };
        for (Int j = 0; j < n; j++) {
            real *x = row_at(live()[i+j]), *y = summed+j*width;
            fetch(row_at(live()[i+std::min(j+8, n-1)]), width*sizeof(real));
            for (Int e = 0; e < width; e += LANES) store(x+e, load(x+e)+load(y+e));
        }
    }
    // One bit per key, or per so many that the bits of a block fit: the same number in both passes.
    uint8_t *kept_bits(int &keys_of_bit) const {
        keys_of_bit = 0;                                       // as a power of two
        while ((strip(p) >> keys_of_bit) >= 8*KEPT*nq) keys_of_bit++;
        return (uint8_t*)c.kept+((b*c.H+h)*c.N+row)*KEPT;
    }
    void keep_live(Int m) {
        int by;
        uint8_t *to = kept_bits(by);
        const bool all = careful || m == n_keys;
        memset(to, all ? 0xff : 0, careful ? KEPT : (strip(p) >> by)/8+1);
        if (!all) for (Int i = 0; i < m; i++) { Int bit = live()[i] >> by; to[bit/8] |= 1 << bit%8; }
    }
    Int read_live() {
        int by;
        const uint8_t *of = kept_bits(by);
        Int m = 0;
        for (Int i = 0; i << by < n_keys; i += 8)
            for (unsigned bits = careful ? 255 : of[i/8]; bits; bits &= bits-1) {
                Int j = (i+__builtin_ctz(bits)) << by, end = std::min(j+(Int(1) << by), n_keys);
                while (j < end) live()[m++] = (int32_t)j++;
            }
        return m;
    }

    Int scores_and_best(vec *top, real *best) {
        Int groups = 0;
        for (int v = 0; v < GROUPS; v++) top[v] = splat(-std::numeric_limits<real>::max());
        each_run([&](const Span &s, Int j0, Int n) {
            real *x = S+in_block(s, j0);
            scores(s, j0, n, x);
            groups = L::add_best(x, n, best, groups, top);
        });
        return groups;
    }
    void entmax_forward() {
        vec top[GROUPS], a[GROUPS];
        real high[QUERIES], thresholds[QUERIES], seen[QUERIES], all[QUERIES];
        Int groups = scores_and_best(top, D), n = n_keys;
        for (int v = 0; v < GROUPS; v++) store(seen+v*LANES, top[v]);
        if (c.sink.data) for (int v = 0; v < GROUPS; v++) {    // one more key, without a value
            store(S+n_keys*QUERIES+v*LANES, splat(sink));
            top[v] = L::max(top[v], splat(sink));
            n = n_keys+1;
        }
        for (int v = 0; v < GROUPS; v++) store(high+v*LANES, top[v]);
        for (int i = 0; i < QUERIES; i++) if (i >= nq || lost[i]) high[i] = INFINITY;    // keeps no key alive
        for (int v = 0; v < GROUPS; v++) top[v] = load(high+v*LANES);
        Int m = L::solve(n, D, groups, top, a);
        m -= m && live()[m-1] == n_keys;
        if (has_factors) {
            each_live(m, [&](const Span &s, Int key, Int i) { factors(s, key, factor+i*QUERIES); });
            multiply(S, factor, m);
        }
        live_runs(m, [&](Int i, Int n) {
            Int stride, rows = n;
            const real *x = live_rows(i, rows, false, stride);
            product({o_rows, p.dv_width}, {S+i*QUERIES, 1, QUERIES}, {x, stride}, nq, p.dv_width, n, i > 0);
        });
        if (!m) memset(o_rows, 0, nq*p.dv_width*sizeof(real));
        if (c.kept) keep_live(m);
        for (int v = 0; v < GROUPS; v++) store(thresholds+v*LANES, top[v]+a[v]);
        for (Int i = 0; i < nq; i++) {
            bool empty = !n_keys || seen[i] == -std::numeric_limits<real>::max();
            all[i] = !empty;
            write_out(i, all[i], empty ? INFINITY : high[i] == INFINITY ? NAN : thresholds[i]);
        }
        if (c.weights) each_live(m, [&](const Span &s, Int key, Int i) { show(s, key, S+i*QUERIES, all); });
    }
    void entmax_backward() {
        real lse[QUERIES], mean[QUERIES];
        read_rows(lse, mean);
        const Int m = read_live();
        live_runs(m, [&](Int i, Int n) {
            Int stride, rows = n;
            const real *x = live_rows(i, rows, true, stride);
            products(x, stride, rows, S+i*QUERIES);
            rows = n;
            x = live_rows(i, rows, false, stride);
            product({D+i*QUERIES, QUERIES}, {x, stride}, {dout_cols, QUERIES}, rows, QUERIES, p.dv_width, false);
        });
        each_live(m, [&](const Span &s, Int key, Int i) {
            finish(s, key, S+i*QUERIES);
            if (has_factors) factors(s, key, factor+i*QUERIES);
        });
        for (int i = m*QUERIES; c.sink.data && i < (m+1)*QUERIES; i++) {
            S[i] = sink; D[i] = 0;
            if (has_factors) factor[i] = 1;
        }
        for (int v = 0; v < GROUPS; v++) pull(v, load(lse+v*LANES), m);
        each_live(m, [&](const Span &s, Int key, Int i) { add_diagonals(s, key, i*QUERIES); });
        to_products(D, m);
        live_runs(m, [&](Int i, Int n) {
            add_live(g->dv, p.dv_width, i, n, S+i*QUERIES, dout_rows);
            add_live(g->dk, p.width, i, n, D+i*QUERIES, q_rows);
            Int stride, rows = n;
            const real *x = live_rows(i, rows, true, stride);
            product({dq_rows, p.width}, {D+i*QUERIES, 1, QUERIES}, {x, stride}, nq, p.width, n, i > 0);
        });
        write_dq(m);
    }
    // One group of lanes: scores to weights, gradients of weights to those of scores.
    void pull(int v, vec a, Int m) {
        const Int n = m+(c.sink.data ? 1 : 0);
        real *x = S+v*LANES, *d = D+v*LANES, *f = factor+v*LANES;
        vec w, s, sum{}, slopes{}, pulled{}, heights{};
        auto grad = [&](Int j) { vec y = load(d+j*QUERIES); return has_factors ? y*load(f+j*QUERIES) : y; };
        const bool wants_alpha = g->dalpha;
        for (Int j = 0; j < n; j++) {
            vec y = load(x+j*QUERIES)-a;
            law(y, w, s);
            sum += w; slopes += s; pulled += s*grad(j);
            if (wants_alpha) heights += s > 0 ? s*y : s;
        }
        vec by = sum > 0 ? 1/(sum > 0 ? sum : splat(1)) : splat(0), dalpha{};
        vec divisor = slopes > 0 ? slopes : splat(1), mean = pulled/divisor;
        vec typical = wants_alpha ? L::typical_phi(heights/divisor*eps) : splat(0);
        auto score_grad = [&](Int j) __attribute__((always_inline)) {  // and the weight, in `w`
            vec t = (load(x+j*QUERIES)-a)*eps;
            law(load(x+j*QUERIES)-a, w, s);
            vec ds = s*(grad(j)-mean);
            if (wants_alpha) {
                t = t > -1 ? t : splat(0);
                dalpha -= ds*(L::phi(t, L::log1p(t))-typical);
            }
            w *= by;
            return ds;
        };
        each_live(m, [&](const Span &span, Int key, Int j) {
            vec ds = score_grad(j);
            if (has_factors) {
                vec raw = w*load(d+j*QUERIES), times = load(f+j*QUERIES);
                to_window(span, key, v, f+j*QUERIES, raw);
                w *= times;
            }
            store(x+j*QUERIES, w);
            store(d+j*QUERIES, ds);
        });
        if (n > m) *found.sink() += L::total(score_grad(m));
        *found.alpha() += L::total(dalpha);
    }

    // ---- tasks: rows of one head, or of the query heads of one key head

    void forward(Int batch, Int head, Int first, Int end) {
        enter(batch, head, false);
        each_block(first, end, [&] { entmax ? entmax_forward() : softmax_forward(); });
    }
    void backward(Int batch, Int key_head, Int first, Int end, double *sums_of_task, Int numbers) {
        for (Int i = 0; i < p.share; i++) {
            found = {sums_of_task+i*numbers, c.table_size};
            enter(batch, key_head*p.share+i, true);
            each_block(first, end, [&] { entmax ? entmax_backward() : softmax_backward(); });
            leave();
        }
    }
    template <class F> void each_block(Int first, Int end, F &&work) {
        for (Int t = 0; t < p.texts(b); t++) {
            Int q0 = first, q1 = end;
            begin(t, q0, q1);
            for (Int i = q0; i < q1;) {
                i = block(i, q1);
                read_queries();
                work();
            }
        }
    }
    // Sums by offset to the gradients of sigma, of a table and of the bias.
    void leave() {
        const real *window = c.after ? times_sums : sums;
        vec dsigma{};
        for (Int copy = 0; copy < LANES; copy++) for (Int y = 0; y < length; y += LANES) {
            vec by_window = load(window+copy*length+y);
            if (g->dsigma) dsigma += by_window*load(slope+y+copy);
            for (Int l = 0; (g->dtable || g->drel_bias) && l < LANES; l++) {
                Int offset = zero-(y+copy+l), t = offset-c.table_first;
                if (g->dtable && t >= 0 && t < c.table_size) found.table()[t] += by_window[l];
                if (g->drel_bias && offset >= -left && offset <= right)
                    found.rel_bias()[bias_place(offset)] += sums[copy*length+y+l];
            }
        }
        *found.sigma() += L::total(dsigma);
    }
};

// ---- entmax by rows -----------------------------------------------------------------------------------------------

// Up to GROUPS rows of scores of one alpha, each along the lanes.
template <class real, int QUERIES> struct Lengthwise : Solver<real, QUERIES, true> {
    typedef Solver<real, QUERIES, true> L;
    using typename L::vec; using typename L::ivec;
    using L::LANES; using L::GROUPS; using L::load; using L::store; using L::splat;
    using L::S; using L::live_room; using L::eps; using L::live; using L::row_sum;
    const Int cols, n;                                         // numbers and vectors of a row
    real *D;

    static Int room(Int cols) { return (rounded(cols, LANES)*GROUPS*2+rounded(cols/LANES+1, 16))*sizeof(real); }
    Lengthwise(Int columns, char *memory) : cols(columns), n((columns+LANES-1)/LANES) {
        S = (real*)memory; D = S+n*QUERIES; live_room = D+n*QUERIES;
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
        bool lost[GROUPS];                                     // a row with NaN or +inf
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
        Int groups = L::add_best(S, n, D, 0, top);
        for (int v = 0; v < GROUPS; v++)
            top[v] = lost[v] ? splat(INFINITY) : L::joined(top[v], [](vec a, vec b) { return L::max(a, b); });
        const Int m = L::solve(n, D, groups, top, a);
        for (int v = 0; v < rows; v++) {
            if (m < n || lost[v]) std::fill(p+v*cols, p+(v+1)*cols, lost[v] ? NAN : 0);
            for (Int j = 0; j < m && !lost[v]; j++) put(p+v*cols, live()[j], load(S+j*QUERIES+v*LANES));
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
            sum += s*y; slopes += s; logs += s*log_w;
            store(S+m*QUERIES, w); store(S+m*QUERIES+LANES, s);
            store(D+m*QUERIES, y); store(D+m*QUERIES+LANES, log_w);
            live()[m++] = (int32_t)j;
        }
        slopes = row_sum(slopes);
        vec divisor = slopes > 0 ? slopes : splat(1), mean = row_sum(sum)/divisor;
        vec typical = L::typical_phi(L::expm1(row_sum(logs)/divisor*eps));
        if (m < n) std::fill(dz, dz+cols, 0);
        for (Int i = 0; i < m; i++) {
            vec w = load(S+i*QUERIES), s = load(S+i*QUERIES+LANES), ds = s*(load(D+i*QUERIES)-mean);
            ds = w != 0 ? ds : splat(0);
            vec l = load(D+i*QUERIES+LANES)*eps;
            dalpha -= ds*(L::phi(w > 0 ? w/s-1 : splat(0), l)-typical);
            put(dz, live()[i], ds);
        }
        return L::total(dalpha);
    }
};

// ---- who does what ------------------------------------------------------------------------------------------------

enum { WORTH_A_THREAD = 1 << 21, MULTIPLICATIONS_OF_A_TASK = 1 << 22 };

// Rows first..end-1 of a head (backward: of the heads of a key head), and the keys whose gradients it clears before.
struct Task { Int b, h, first, end; double cost; Int number, clear, cleared; };

// Memory of a call. The last one is kept for whoever comes first; a call beside that allocates its own.
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

// `work(task, thread)` for all tasks, the next one by whichever thread is free: those of the team, or some that live as
// long as the call.
template <class F> void run(Int tasks, Int threads, Team *team, F &&work) {
    std::atomic<Int> next(0), number(0);
    auto loop = [&](Int thread) { for (Int t; (t = next++) < tasks;) work(t, thread); };
    auto member = [&] { Int thread = number++; if (thread < threads) loop(thread); };
    if (threads > 1 && team) return team([](void *x) { (*(decltype(member)*)x)(); }, &member, (unsigned)threads, 0);
    std::vector<std::thread> others;
    others.reserve(threads);
    try { for (Int i = 1; i < threads; i++) others.emplace_back(loop, i); }
    catch (const std::exception &) {}                          // none to be had: the work is done by those there are
    loop(0);
    for (auto &t : others) t.join();
}
// The number of threads worth starting; the dearest tasks come first.
Int threads_for(const Call &c, std::vector<Task> &tasks) {
    double cost = 0;
    for (const Task &t : tasks) cost += t.cost;
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task &a, const Task &b) { return a.cost > b.cost; });
    return std::max<Int>(1, std::min({c.threads, (Int)tasks.size(), (Int)(cost/WORTH_A_THREAD)}));
}
// Rows of a task: work for about a tenth of a millisecond, or `least`, as a task copies and looks through its keys anew;
// cut by the problem, never by the number of threads.
template <class real> Int rows_of_task(const Problem<real> &p, Reach r, Int least) {
    Int rows = Int(MULTIPLICATIONS_OF_A_TASK/(double(r.left+r.right+SHORT)*(p.width+p.dv_width)));
    return std::min(p.c.N, rounded(std::max(rows, least), TALL));
}

template <class real> void forward(const Call &c) {
    Problem<real> p(c);
    std::vector<Task> tasks;
    Int most = 1;
    for (Int b = 0; b < c.B; b++) for (Int h = 0; h < c.H; h++) {
        Reach r = p.reaches[b*c.H+h];
        Int least = std::max<Int>(512, std::min(c.M, r.left+r.right)/8);
        Int rows = std::max<Int>(rows_of_task(p, r, least), 1);
        most = std::max(most, rows);
        for (Int i = 0; i < c.N; i += rows) {
            Int end = std::min(i+rows, c.N);
            tasks.push_back({b, h, i, end, double(end-i)*(r.left+r.right+SHORT)*(p.width+p.dv_width), 0, 0, 0});
        }
    }
    typedef Worker<real, SHORT> W;
    Int threads = threads_for(c, tasks), room = W::room(p, most);
    Memory memory(threads*room);
    run(tasks.size(), threads, c.team, [&](Int t, Int thread) {
        const Task &x = tasks[t];
        W(p, nullptr, memory.data()+thread*room).forward(x.b, x.h, x.first, x.end);
    });
}

// Gradients of keys are sums over queries. Rows are cut into chunks longer than a window, and even chunks come before
// odd ones: no two at a time have a key in common, and every sum has one order.
template <class real, int QUERIES> void backward(const Call &c, const Grads &g) {
    Problem<real> p(c);
    const Int bias_size = c.rel_bias.data ? 2*c.bias_reach+1 : 0;
    const Int numbers = Sums::numbers(c.table_size, bias_size);
    std::vector<Task> tasks[2];                                // of the even chunks, of the odd ones
    std::vector<Int> key_head;                                 // of a task, by its number
    Int most = 1;
    for (Int b = 0; b < c.B; b++) for (Int hk = 0; hk < c.Hkv; hk++) {
        Reach r = {0, 0};
        double pairs = 0;
        for (Int h = hk*p.share; h < (hk+1)*p.share; h++) {
            Reach x = p.reaches[b*c.H+h];
            r = {std::max(r.left, x.left), std::max(r.right, x.right)};
            pairs += x.left+x.right+QUERIES;
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
            Int end = std::min((i+1)*rows, c.N), clear = start(i), cleared = i%2 ? clear : start(i+2);
            double cost = (end-i*rows)*pairs*(p.width+p.dv_width)*3.5;
            tasks[i%2].push_back({b, hk, i*rows, end, cost, (Int)key_head.size(), clear, cleared});
            key_head.push_back(b*c.Hkv+hk);
        }
    }
    const Int own = p.share*numbers;
    std::vector<double> found(key_head.size()*own), all(c.B*c.H*numbers);
    typedef Worker<real, QUERIES> W;
    Int room = W::room(p, most);
    for (auto &some : tasks) {
        if (some.empty()) continue;
        Int threads = threads_for(c, some);
        Memory memory(threads*room);
        run(some.size(), threads, c.team, [&](Int t, Int thread) {
            const Task &x = some[t];
            for (Int j = x.clear; j < x.cleared; j++) {
                memset((real*)g.dk.data+x.b*g.dk.b+x.h*g.dk.h+j*g.dk.n, 0, p.width*sizeof(real));
                memset((real*)g.dv.data+x.b*g.dv.b+x.h*g.dv.h+j*g.dv.n, 0, p.dv_width*sizeof(real));
            }
            W(p, &g, memory.data()+thread*room)
                .backward(x.b, x.h, x.first, x.end, found.data()+x.number*own, numbers);
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

// Rows of scores to weights; with a gradient `g` of weights `x`, to those of the scores and, row by row, of alpha.
template <class real> void entmax(const real *x, const real *g, const real *eps, real *out, real *dalpha, Int rows,
                                  Int cols, Int step, Int threads, Team *team) {
    typedef Lengthwise<real, 2*VECTOR/(int)sizeof(real)> W;
    const Int of_task = std::max<Int>(1, (1 << 16)/cols), tasks = (rows+of_task-1)/of_task;
    const Int room = rounded(W::room(cols), 64);
    threads = std::max<Int>(1, std::min(threads, tasks/2));
    Memory memory(threads*room);
    run(tasks, threads, team, [&](Int t, Int thread) {
        W worker(cols, memory.data()+thread*room);
        const Int end = std::min((t+1)*of_task, rows);
        for (Int i = t*of_task, n = 1; i < end; i += n, n = 1) {
            worker.eps = eps[i*step];
            if (g) { real a = worker.pull(x+i*cols, g+i*cols, out+i*cols); if (dalpha) dalpha[i] = a; continue; }
            while (n < W::GROUPS && i+n < end && eps[(i+n)*step] == worker.eps) n++;
            worker.weights(x+i*cols, out+i*cols, n);
        }
    });
}

// ---- what a caller asks first: how large its numbers are, and what a mask of pairs says ----------

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
    std::array<std::array<Int, 2>, 4> outer;   // size and stride of the axes that tell a run's place
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

// A mask [B,H,N,M] of numbers that are 0 where a key is seen, else the least one or -infinity.
struct Mask { const char *data; Int b, h, n, B, H, N, M, kind; };
// Seen are the keys of `keep` whose offset j - i lies from `low` to `high`. The others say whether
// the least number occurs, a row without a key, and a key that is hidden from all.
struct Seen { Int low, high, least, empty, holes; };

template <class U> struct MaskReader {
    const Mask m;
    const U minus_infinity, least;             // as bits
    struct Row { Int first, last, count; };    // keys that a row sees
    std::vector<Row> rows;                     // [B,N]
    std::atomic<bool> other{false}, finite{false};

    MaskReader(const Mask &mask, U inf)
        : m(mask), minus_infinity(inf), least(inf-1), rows(m.B*m.N) {}

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
            U strange = 0, low = 0;
            for (Int j = 0; j < n; j++) {
                const U zero = (U)(y[j] << 1) == 0, is_least = y[j] == least;
                strange |= !(zero | is_least | (y[j] == minus_infinity));
                low |= is_least;
                s[j] = (uint8_t)zero;
            }
            if (strange) { other = true; return; }
            if (low) finite = true;
            Int some = 0;
            for (Int j = 0; j < n; j++) k[j] |= s[j], some += s[j];
            count += some;
        }
        Row &r = rows[b*m.N+i];
        r = {0, -1, count};
        if (!count) return;
        r.first = (const uint8_t*)memchr(seen, 1, m.M)-seen;
        r.last = r.first+count-1;
        if (!memchr(seen+r.first, 0, count)) return;           // side by side
        for (r.last = m.M-1; !seen[r.last];) r.last--;
    }
    // `keep` [B,M] comes back; false where the mask says something else.
    bool read_all(uint8_t *keep, Seen &found, Int threads, Team *team) {
        const Int of_task = std::max<Int>(8, (1 << 16)/m.M);    // rows
        const Int parts = (m.N+of_task-1)/of_task, tasks = m.B*parts;
        std::vector<uint8_t> room(tasks*m.M*2);
        auto place = [&](Int t) { return room.data()+t*m.M*2; };
        read(0, m.N-1, place(0), place(0)+m.M);                // most others show there what they are
        if (other) return false;
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
        return is_band(keep, found);
    }
    bool is_keys(const uint8_t *keep, Seen &found) const {
        found = {-m.M, m.M, finite, 0, memchr(keep, 0, m.B*m.M) != nullptr};
        for (Int b = 0; b < m.B; b++) found.empty |= rows[b].count == 0;
        return true;
    }
    // The narrowest band around all that is seen: nothing in it may be hidden but by `keep`, and
    // sums of `keep` count what a row would see.
    bool is_band(const uint8_t *keep, Seen &found) const {
        found = {m.M, -m.M-m.N, finite, 0, 0};
        for (Int b = 0; b < m.B; b++) for (Int i = 0; i < m.N; i++) {
            const Row &r = rows[b*m.N+i];
            if (!r.count) { found.empty = 1; continue; }
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
};

}  // namespace

// ---- the interface ------------------------------------------------------------------------------------------------

#define EXPORT extern "C" __attribute__((visibility("default")))
#ifndef SOURCE
#define SOURCE 0                           // built by hand: nothing is known of it
#endif

EXPORT Int dynattn_source() { return SOURCE; }   // a checksum of this file
EXPORT Int dynattn_vector() { return VECTOR; }
EXPORT Int dynattn_sizes(Int which) { return which ? sizeof(Grads) : sizeof(Call); }
EXPORT const char *dynattn_members(Int which) { return which ? members_of_Grads : members_of_Call; }
// Whether the work was done, which it is not where memory is lacking.
EXPORT bool dynattn_forward(const Call *c) {
    try { c->kind == F64 ? forward<double>(*c) : forward<float>(*c); }
    catch (const std::bad_alloc &) { return false; }
    return true;
}
EXPORT bool dynattn_backward(const Call *c, const Grads *g) {
    auto all = c->kind == F64 ? c->alpha.data ? backward<double, SHORT> : backward<double, TALL>
                              : c->alpha.data ? backward<float, SHORT> : backward<float, TALL>;
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
// Whether a mask hides keys, or pairs outside a band, or both: 1 and 0; -1 where memory is lacking.
EXPORT Int dynattn_read_mask(const Mask *m, uint8_t *keep, Seen *found, Int threads, Team *team) {
    auto read = [&](auto minus_infinity) {
        MaskReader<decltype(minus_infinity)> reader(*m, minus_infinity);
        return reader.read_all(keep, *found, threads, team);
    };
    try {
        if (m->kind == F64) return read(uint64_t(0xfff0000000000000));
        if (m->kind == F32) return read(uint32_t(0xff800000));
        return read(uint16_t(m->kind == BF16 ? 0xff80 : 0xfc00));
    }
    catch (const std::bad_alloc &) { return -1; }
}

EXPORT bool dynattn_entmax(const void *x, const void *g, const void *eps, void *out, void *dalpha, Int rows, Int cols,
                           Int step, Int kind, Int threads, Team *team) {
    auto all = [&](auto real) {
        typedef decltype(real) T;
        entmax((const T*)x, (const T*)g, (const T*)eps, (T*)out, (T*)dalpha, rows, cols, step, threads, team);
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
EXPORT void dynattn_product(float *c, const float *a, const float *b, Int rows, Int cols, Int depth) {
    Lanes<float, SHORT>::product({c, cols}, {a, depth}, {b, cols}, rows, cols, depth, false);
}
EXPORT void dynattn_turn(float *columns, const float *rows, Int d) { Lanes<float, SHORT>::turn(columns, rows, d, 1); }
