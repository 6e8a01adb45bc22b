// See rows.hpp. Each set of instructions gives this file a LEVEL of its own.
#include "rows.hpp"

#include "passes.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#ifndef LEVEL
#define LEVEL plain
#endif

namespace rows {

namespace {

constexpr int STEP = 4;
#include "lanes.hpp"

// The largest magnitude of a group; NaN if one of its numbers is. Without their signs, numbers have
// the order of their bits, and NaN comes after infinity.
INLINE float peak_of(const float *values, int count) {
    Whole most = {};
    for (int k = 0; k < count; k += LANES) {
        const Whole here = load_lanes<Whole>(values + k) & 0x7FFFFFFF;
        most = pick(here > most, here, most);
    }
    const int32_t bits = largest<int32_t>(most);
    return passes::as<float>(bits);
}

// What makes the largest magnitude 127. It is 0, and so are the numbers of the group, where that is
// no finite number: for a group of zeros or nearly zeros, and for infinities and NaN, which live on
// in the scale.
INLINE float factor(float peak) {
    const float by = 127.0f / peak;
    return by <= __FLT_MAX__ ? by : 0.0f;
}

// The nearest float16, the even one of two.
INLINE uint16_t narrowed(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    if (size > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (size >= 0x477FF000) return uint16_t(sign | 0x7C00);  // from 65,520 on
    if (size >= 0x38800000)
        return uint16_t(sign | (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
    const float shifted = __builtin_fabsf(value) * 0x1p24f + 8388608.0f;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    return uint16_t(sign | (bits & 0x7FFFFF));
}

// Sums of whole numbers for 16 channels. `add` takes 64 bytes of weights, 4 inputs of each channel,
// and the same 4 inputs of a row as one word. Where weights count from 0, `start` subtracts what the
// sums will have too much: `less` is -ZERO times the sum of the row's inputs.
#if defined(__AVX512VNNI__)

struct Sums {
    __m512i lanes;
    template <int ZERO>
    INLINE void start(int32_t less) {
        lanes = _mm512_set1_epi32(less);
    }
    template <int ZERO>
    INLINE void add(__m512i weights, int32_t inputs) {
        lanes = _mm512_dpbusd_epi32(lanes, weights, _mm512_set1_epi32(inputs));
    }
    template <int ZERO>
    INLINE Floats floats() const {
        return rows::floats((WholeVector)lanes);
    }
};
typedef __m512i Weights;
constexpr int MOST = 16;
INLINE Weights weights(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE Weights low(Weights both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
INLINE Weights high(Weights both) { return low(_mm512_srli_epi16(both, 4)); }

#elif defined(__AVX2__)

struct Weights {
    __m256i one, two;
};
struct Sums {
    __m256i one, two;
#if defined(__AVXVNNI__)
    template <int ZERO>
    INLINE void start(int32_t less) {
        one = two = _mm256_set1_epi32(less);
    }
    template <int ZERO>
    static INLINE __m256i more(__m256i sum, __m256i weights, __m256i inputs) {
        return _mm256_dpbusd_avx_epi32(sum, weights, inputs);
    }
    template <int ZERO>
    INLINE __m256i whole(__m256i sum) const {
        return sum;
    }
#else
    // Of weights of 4 bits, a group has sums of 16 bits: 16 x 15 x 127 fits.
    int32_t less;
    template <int ZERO>
    INLINE void start(int32_t less) {
        this->less = less;
        one = two = _mm256_setzero_si256();
    }
    template <int ZERO>
    static INLINE __m256i more(__m256i sum, __m256i weights, __m256i inputs) {
        if (ZERO != 128)
            return in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, inputs)));
        // 2 x 255 x 127 does not fit into the 16 bits of maddubs, 2 x 128 x 127 does; nothing is
        // too much then.
        weights = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        inputs = _mm256_sign_epi8(inputs, weights);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), inputs);
        return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    }
    // The compiler would add in a tree, and keep all products on the stack until then.
    static INLINE __m256i in_order(__m256i sum) {
        __asm__("" : "+x"(sum));
        return sum;
    }
    template <int ZERO>
    INLINE __m256i whole(__m256i sum) const {
        if (ZERO == 128) return sum;
        sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        return _mm256_add_epi32(sum, _mm256_set1_epi32(less));
    }
#endif
    template <int ZERO>
    INLINE void add(Weights weights, int32_t inputs) {
        const __m256i all = _mm256_set1_epi32(inputs);
        one = more<ZERO>(one, weights.one, all);
        two = more<ZERO>(two, weights.two, all);
    }
    template <int ZERO>
    INLINE Floats floats() const {
        return {_mm256_cvtepi32_ps(whole<ZERO>(one)), _mm256_cvtepi32_ps(whole<ZERO>(two))};
    }
};
constexpr int MOST = 4;
INLINE Weights weights(const uint8_t *from) {
    const __m256i *at = (const __m256i *)from;
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
INLINE __m256i masked(__m256i both) { return _mm256_and_si256(both, _mm256_set1_epi8(15)); }
INLINE Weights low(Weights both) { return {masked(both.one), masked(both.two)}; }
INLINE Weights high(Weights both) {
    return {masked(_mm256_srli_epi16(both.one, 4)), masked(_mm256_srli_epi16(both.two, 4))};
}

#elif defined(__ARM_FEATURE_DOTPROD)

// Of 4 channels in each part.
struct Weights {
    uint8x16_t parts[4];
};
struct Sums {
    int32x4_t parts[4];
#if defined(__ARM_FEATURE_MATMUL_INT8)
    template <int ZERO>
    INLINE void start(int32_t less) {
        for (int32x4_t &part : parts) part = vdupq_n_s32(less);
    }
    template <int ZERO>
    static INLINE int32x4_t more(int32x4_t sum, uint8x16_t weights, int8x16_t inputs) {
        return vusdotq_s32(sum, weights, inputs);
    }
#else
    // Weights of 8 bits get their sign first, so nothing is too much then.
    template <int ZERO>
    INLINE void start(int32_t less) {
        for (int32x4_t &part : parts) part = vdupq_n_s32(ZERO == 128 ? 0 : less);
    }
    template <int ZERO>
    static INLINE int32x4_t more(int32x4_t sum, uint8x16_t weights, int8x16_t inputs) {
        if (ZERO == 128) weights = veorq_u8(weights, vdupq_n_u8(128));
        return vdotq_s32(sum, vreinterpretq_s8_u8(weights), inputs);
    }
#endif
    template <int ZERO>
    INLINE void add(const Weights &weights, int32_t inputs) {
        const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(inputs));
        for (int i = 0; i < 4; ++i) parts[i] = more<ZERO>(parts[i], weights.parts[i], all);
    }
    template <int ZERO>
    INLINE Floats floats() const {
        return {{vcvtq_f32_s32(parts[0]), vcvtq_f32_s32(parts[1])},
                {vcvtq_f32_s32(parts[2]), vcvtq_f32_s32(parts[3])}};
    }
};
constexpr int MOST = 4;
INLINE Weights weights(const uint8_t *from) {
    return {{vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
}
INLINE Weights low(Weights both) {
    for (uint8x16_t &part : both.parts) part = vandq_u8(part, vdupq_n_u8(15));
    return both;
}
INLINE Weights high(Weights both) {
    for (uint8x16_t &part : both.parts) part = vshrq_n_u8(part, 4);
    return both;
}

#else

struct Weights {
    uint8_t bytes[64];
};
struct Sums {
    int32_t lanes[CHANNELS];
    template <int ZERO>
    INLINE void start(int32_t) {
        for (int32_t &lane : lanes) lane = 0;
    }
    template <int ZERO>
    INLINE void add(const Weights &weights, int32_t inputs) {
        int8_t four[STEP];
        __builtin_memcpy(four, &inputs, sizeof four);
        for (int n = 0; n < CHANNELS; ++n)
            for (int k = 0; k < STEP; ++k)
                lanes[n] += (weights.bytes[STEP * n + k] - ZERO) * four[k];
    }
    template <int ZERO>
    INLINE Floats floats() const {
        return rows::floats(load_lanes<Whole>(lanes));
    }
};
constexpr int MOST = 4;
INLINE Weights weights(const uint8_t *from) {
    Weights found;
    __builtin_memcpy(found.bytes, from, sizeof found.bytes);
    return found;
}
INLINE Weights low(Weights both) {
    for (uint8_t &byte : both.bytes) byte &= 15;
    return both;
}
INLINE Weights high(Weights both) {
    for (uint8_t &byte : both.bytes) byte >>= 4;
    return both;
}

#endif

// Rows of a tile, and words of a row of it.
constexpr int TILE = 16, SLAB = 16;

// Whether so many rows are multiplied with a matrix by tiles. With groups of FINE the scales take most
// of the time, which tiles do not shorten.
INLINE bool in_tiles(int rows, const Matrix &matrix) {
#if defined(__AMX_INT8__)
    return rows >= (matrix.fine ? 32 : 3);
#else
    (void)rows, (void)matrix;
    return false;
#endif
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// The sums of M rows. `add` takes 8 inputs of each channel and of each row: the words of the rows
// that begin at `words`, and those that begin `rows` words later, and leaves both behind.
template <int M, int BITS, int ZERO, bool = PAIRS && M % 2 == 0>
struct Several {
    Sums sums[M];
    template <class Less>
    INLINE void start(Less less) {
        for (int m = 0; m < M; ++m) sums[m].template start<ZERO>(less(m));
    }
    INLINE void add(const uint8_t *from, const int32_t *&words, int rows) {
        const Weights both = weights(from), one = BITS == 4 ? low(both) : both;
        for (int m = 0; m < M; ++m) sums[m].template add<ZERO>(one, words[m]);
        words += rows;
        const Weights two = BITS == 4 ? high(both) : weights(from + 64);
        for (int m = 0; m < M; ++m) sums[m].template add<ZERO>(two, words[m]);
        words += rows;
    }
    INLINE Floats floats(int m) const { return sums[m].template floats<ZERO>(); }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
// An instruction multiplies 8 inputs of 2 rows by those of 2 channels. A part has the sums of both
// rows with the first channel, and then with the second.
template <int M, int BITS, int ZERO>
struct Several<M, BITS, ZERO, true> {
    int32x4_t parts[M / 2][8];
    template <class Less>
    INLINE void start(Less less) {
        for (int p = 0; p < M / 2; ++p) {
            const int32_t both[2] = {less(2 * p), less(2 * p + 1)};
            for (int32x4_t &part : parts[p]) part = vcombine_s32(vld1_s32(both), vld1_s32(both));
        }
    }
    INLINE void add(const uint8_t *from, const int32_t *&words, int rows) {
        const Weights first = weights(from), one = BITS == 4 ? low(first) : first;
        const Weights two = BITS == 4 ? high(first) : weights(from + 64);
        int8x16_t inputs[M / 2];
        for (int p = 0; p < M / 2; ++p) {
            const int32x2x2_t both =
                vzip_s32(vld1_s32(words + 2 * p), vld1_s32(words + rows + 2 * p));
            inputs[p] = vreinterpretq_s8_s32(vcombine_s32(both.val[0], both.val[1]));
        }
        for (int i = 0; i < 4; ++i) {
            const uint32x4x2_t both = vzipq_u32(vreinterpretq_u32_u8(one.parts[i]),
                                                vreinterpretq_u32_u8(two.parts[i]));
            for (int p = 0; p < M / 2; ++p)
                for (int half = 0; half < 2; ++half) {
                    int32x4_t &part = parts[p][2 * i + half];
                    part = vusmmlaq_s32(part, vreinterpretq_u8_u32(both.val[half]), inputs[p]);
                }
        }
        words += 2 * size_t(rows);
    }
    INLINE Floats floats(int m) const {
        float32x4_t found[4];
        for (int i = 0; i < 4; ++i) {
            const int32x4_t left = parts[m / 2][2 * i], right = parts[m / 2][2 * i + 1];
            found[i] = vcvtq_f32_s32(m % 2 ? vuzp2q_s32(left, right) : vuzp1q_s32(left, right));
        }
        return {{found[0], found[1]}, {found[2], found[3]}};
    }
};
#endif

// The next place in some room at which a line of the cache begins, at most 63 bytes further on.
INLINE char *aligned(char *room) { return room + -uintptr_t(room) % 64; }

// Rows of inputs in 8 bits. Words of 4 inputs have the order (words, rows): so the rows of a step are
// neighbours, however long they are, and do not fall into the same places of the cache. For tiles it
// is (slabs of words, lines, SLAB); there are as many lines as rows, and at least TILE.
struct Inputs {
    int rows, lines, count;  // count: whole groups
    bool tiled;
    int32_t *words;
    float *scales;  // (groups, lines)
    int32_t *sums;  // (groups of FINE, lines), times -8

    static size_t bytes(int rows, int count) {
        const int each = count + count / GROUP * 4 + count / FINE * 4;
        return size_t(rows) * ((each + 63) / 64 * 64) + 64;
    }
    static size_t most_bytes(int rows, int count) { return bytes(rows < TILE ? TILE : rows, count); }
    static Inputs at(char *room, int rows, int count, bool tiled) {
        room = aligned(room);
        Inputs found{rows, tiled && rows < TILE ? TILE : rows, count, tiled, (int32_t *)room,
                     nullptr, nullptr};
        found.scales = (float *)(room + size_t(found.lines) * count);
        found.sums = (int32_t *)(found.scales + size_t(found.lines) * (count / GROUP));
        return found;
    }
    size_t place(int row, int word) const {
        if (!tiled) return size_t(word) * lines + row;
        return (size_t(word / SLAB) * lines + row) * SLAB + word % SLAB;
    }

    // Round one group of one row. Of a row of `all` numbers, what the last group lacks is 0.
    INLINE void take(int row, int group, const float *values, int all) const {
        static const float zeros[GROUP] = {};
        float last[GROUP];
        const int left = all - group * GROUP;
        if (left < GROUP) {
            for (int k = 0; k < GROUP; ++k) last[k] = k < left ? values[k] : 0.0f;
            values = last;
        }
        const float peak = peak_of(values, GROUP), by = factor(peak);
        if (!(by > 0)) values = zeros;
        int32_t *to = words + place(row, group * GROUP / STEP);
        for (int fine = 0; fine < GROUP; fine += FINE) {
            Whole sum = {};
            for (int k = fine; k < fine + FINE; k += LANES) {
                const Whole whole = rounded(load(values + k) * by);
                sum += whole;
                int8_t narrow[LANES];
                int32_t four[LANES / STEP];
                store_bytes(narrow, whole);
                __builtin_memcpy(four, narrow, sizeof four);
                const int word = k / STEP;
                if (tiled)
                    __builtin_memcpy(to + word / SLAB * size_t(lines) * SLAB + word % SLAB, four,
                                     sizeof four);
                else
                    for (int i = 0; i < LANES / STEP; ++i) to[size_t(word + i) * lines] = four[i];
            }
            int32_t each[LANES], total = 0;
            store(each, sum);
            for (int32_t one : each) total += one;
            sums[size_t((group * GROUP + fine) / FINE) * lines + row] = -8 * total;
        }
        scales[size_t(group) * lines + row] = peak / 127.0f;
        for (int empty = rows; row == 0 && empty < lines; ++empty)
            scales[size_t(group) * lines + empty] = 0.0f;
    }

    // Take a row of others, of as many numbers.
    INLINE void copy(int row, const Inputs &others, int other) const {
        for (int i = 0; i < count / STEP; ++i)
            words[place(row, i)] = others.words[others.place(other, i)];
        const auto each = [&](auto *to, const auto *from, int many) {
            for (int i = 0; i < many; ++i)
                to[size_t(i) * lines + row] = from[size_t(i) * others.lines + other];
        };
        each(scales, others.scales, count / GROUP);
        each(sums, others.sums, count / FINE);
    }
};

// What a row's sums over a group of weights begin with.
template <int BITS, int SPAN>
INLINE int32_t beginning(const int32_t *sums, int rows) {
    int32_t all = 0;
    for (int i = 0; i < SPAN / FINE; ++i) all += sums[size_t(i) * rows];
    return BITS == 4 ? all : 16 * all;
}

// The scales of a group for 16 channels.
template <int SPAN>
INLINE Floats scales_at(const uint8_t *from) {
    return SPAN == FINE ? load_halves(from) : load_lanes<Floats>(from);
}

// The sums of M rows with a block of channels.
template <int M, int BITS, int SPAN, bool LOWS>
INLINE void tile(const uint8_t *from, const uint8_t *scales, const Inputs &inputs, int row,
                 const float *bias, float *out, int width, bool onto) {
    static_assert(BITS == 8 || SPAN == FINE, "sums of 4 bits are kept in 16");
    constexpr bool FROM_ZERO = LOWS && BITS == 4;
    constexpr int ZERO = FROM_ZERO ? 0 : 1 << (BITS - 1);
    Floats total[M];
    for (int m = 0; m < M; ++m) total[m] = Floats{};
    const int rows = inputs.lines;
    const int32_t *words = inputs.words + row, *less = inputs.sums + row;
    for (int first = 0; first < inputs.count; first += SPAN) {
        Several<M, BITS, ZERO> sums;
        sums.start([&](int m) { return FROM_ZERO ? 0 : beginning<BITS, SPAN>(less + m, rows); });
        for (int k = 0; k < SPAN; k += 2 * STEP, from += 16 * BITS)
            sums.add(from, words, rows);
        const float *each = inputs.scales + size_t(first / GROUP) * rows + row;
        const Floats scale = scales_at<SPAN>(scales);
        scales += CHANNELS * (SPAN == FINE ? 2 : 4);
        for (int m = 0; m < M; ++m) total[m] += sums.floats(m) * (scale * each[m]);
        if (LOWS) {
            const Floats lows = load_halves(scales);
            scales += CHANNELS * 2;
            for (int m = 0; m < M; ++m) total[m] += lows * (float(less[m]) * each[m]);
        }
        less += size_t(SPAN / FINE) * rows;
    }
    for (int m = 0; m < M; ++m) {
        float *to = out + size_t(row + m) * width;
        if (bias) total[m] += load(bias);
        store(to, onto ? load(to) + total[m] : total[m]);
    }
}

// Room for what a call computes.
struct Room {
    char *bytes = nullptr;
    size_t size = 0;
    ~Room() { __builtin_free(bytes); }
    char *of(size_t wanted) {
        if (wanted > size) {
            __builtin_free(bytes);
            bytes = (char *)__builtin_malloc(size = wanted + wanted / 4);
            if (!bytes) __builtin_trap();
        }
        return bytes;
    }
};

// Of each thread that calls.
static thread_local Room room;

#if defined(__AMX_INT8__)
#include "tiles.hpp"
#else
struct Tiles {
    explicit Tiles(bool) {}
};
template <int BITS, int SPAN, bool LOWS>
INLINE void block_in_tiles(const Matrix &, const Inputs &, int, float *, bool) {}
#endif

template <int BITS, int SPAN, bool LOWS>
INLINE void block(const Matrix &matrix, const Inputs &inputs, int at, float *out, bool onto) {
    if (inputs.tiled) return block_in_tiles<BITS, SPAN, LOWS>(matrix, inputs, at, out, onto);
    const uint8_t *from = matrix.numbers + at * matrix.block_bytes();
    const uint8_t *scales = matrix.scales + at * matrix.scale_bytes();
    const float *bias = matrix.bias ? matrix.bias + at * CHANNELS : nullptr;
    const int width = matrix.width(), rows = inputs.rows;
    out += at * CHANNELS;
    int row = 0;
#define EACH(M)                                                                                   \
    if (M <= MOST)                                                                                \
        for (; row + M <= rows; row += M)                                                         \
            tile<(M <= MOST ? M : 1), BITS, SPAN, LOWS>(from, scales, inputs, row, bias, out,     \
                                                        width, onto);
    EACH(16)
    EACH(8)
    EACH(4)
    EACH(2)
    EACH(1)
#undef EACH
}

// One product of some, all of the same inputs.
struct Product {
    const Matrix *matrix;
    float *out;
    bool onto;
};

INLINE void multiply_block(const Matrix &matrix, const Inputs &inputs, int at, float *out,
                           bool onto) {
    if (matrix.bits == 4 && matrix.lows)
        block<4, FINE, true>(matrix, inputs, at, out, onto);
    else if (matrix.bits == 4)
        block<4, FINE, false>(matrix, inputs, at, out, onto);
    else if (matrix.lows)
        block<8, FINE, true>(matrix, inputs, at, out, onto);
    else if (matrix.fine)
        block<8, FINE, false>(matrix, inputs, at, out, onto);
    else
        block<8, GROUP, false>(matrix, inputs, at, out, onto);
}

INLINE void multiplied(const Team &team, const Inputs &inputs, const Product *products, int count) {
    int blocks = 0;
    for (int i = 0; i < count; ++i) blocks += products[i].matrix->blocks();
    const Tiles tiles(inputs.tiled);
    team.each(blocks, [&](int at) {
        const Product *product = products;
        for (; at >= product->matrix->blocks(); ++product) at -= product->matrix->blocks();
        multiply_block(*product->matrix, inputs, at, product->out, product->onto);
    });
}

INLINE void take_rows(const Team &team, const Inputs &inputs, const float *values, int count) {
    team.each(inputs.rows, [&](int row) {
        for (int g = 0; g * GROUP < count; ++g)
            inputs.take(row, g, values + size_t(row) * count + g * GROUP, count);
    });
}

struct Multiplication {
    const float *values;
    const Matrix &matrix;
    Inputs inputs;
    Product product;
    Meeting meeting;
};

void multiply(const float *values, int rows, const Matrix &matrix, float *out, int threads) {
    const int count = padded(matrix.inputs);
    char *bytes = room.of(Inputs::most_bytes(rows, count));
    Multiplication all{values, matrix, Inputs::at(bytes, rows, count, in_tiles(rows, matrix)),
                       {&matrix, out, false}, Meeting(threads)};
    in_parallel(threads, [](void *work) {
        Multiplication &all = *static_cast<Multiplication *>(work);
        const Team team(all.meeting);
        take_rows(team, all.inputs, all.values, all.matrix.inputs);
        multiplied(team, all.inputs, &all.product, 1);
    }, &all);
}

// Weights in few bits.

// Round a group of weights by a scale, to numbers from `least` to `most`; returns how well they can
// stand for the weights with the best scale, which is put into `best`.
INLINE float fitted(const float *weights, int count, float by, float least, float most,
                    int8_t *found, float *best) {
    Floats along = {}, square = {};
    for (int k = 0; k < count; k += LANES) {
        const Floats here = load(weights + k);
        Floats whole = floats(rounded(here * by));
        whole = pick(whole < least, Floats{} + least, whole);
        whole = pick(whole > most, Floats{} + most, whole);
        along += here * whole;
        square += whole * whole;
        store_bytes(found + k, rounded(whole));
    }
    const float length = added(square), product = added(along);
    *best = length > 0 ? product / length : 0.0f;
    return product * *best;
}

// The numbers of a group and their scale. In 8 bits the largest weight is 127. In 4 bits there are
// few numbers, so some scales are tried, with the 16th number, -8, on either side. Scales that would
// cut off the largest weights have the smaller squared error, and the worse text (docs/log.md).
INLINE float chosen(const float *weights, int bits, int8_t *found) {
    const float peak = peak_of(weights, bits == 4 ? FINE : GROUP), by = factor(peak);
    float scale = 0.0f;
    if (!(by > 0)) return peak / 127.0f;  // the numbers are 0
    if (bits == 8) {
        fitted(weights, GROUP, by, -127.0f, 127.0f, found, &scale);
        return peak / 127.0f;
    }
    float highest = -1.0f;
    for (int step = 0; step < 6; ++step) {
        int8_t tried[FINE];
        float best;
        const float levels = 7.75f + 0.25f * float(step / 2);
        const float fit = fitted(weights, FINE, (step % 2 ? -levels : levels) / peak, -8.0f, 7.0f,
                                 tried, &best);
        if (fit > highest) {
            highest = fit, scale = best;
            __builtin_memcpy(found, tried, sizeof tried);
        }
    }
    return scale;
}

struct Packing {
    const float *weights;
    const Matrix &matrix;
    int first, outputs;
    Meeting meeting;
};

void pack_group(const Packing &all, int at, int group) {
    const Matrix &matrix = all.matrix;
    const int together = matrix.group(), block = all.first + at;
    uint8_t *to = matrix.numbers + block * matrix.block_bytes() +
                  size_t(group) * (together * CHANNELS * matrix.bits / 8);
    float scales[CHANNELS] = {};
    for (int n = 0; n < CHANNELS; ++n) {
        int8_t found[GROUP] = {};
        const int output = at * CHANNELS + n, left = matrix.inputs - group * together;
        if (output < all.outputs && left > 0) {
            const float *weights = all.weights + size_t(output) * matrix.inputs + group * together;
            float last[GROUP] = {};
            if (left < together)
                weights = (float *)__builtin_memcpy(last, weights, left * sizeof(float));
            scales[n] = chosen(weights, matrix.bits, found);
        }
        for (int k = 0; k < together; ++k) {
            if (matrix.bits == 8) {
                to[(k / STEP * CHANNELS + n) * STEP + k % STEP] = uint8_t(found[k] + 128);
            } else {
                uint8_t &byte = to[(k / (2 * STEP) * CHANNELS + n) * STEP + k % STEP];
                const uint8_t number = uint8_t(found[k] + 8);
                byte = k % (2 * STEP) < STEP ? number : uint8_t(byte | number << 4);
            }
        }
    }
    uint8_t *place = matrix.scales + block * matrix.scale_bytes();
    if (matrix.bits == 8) {
        __builtin_memcpy(place + group * sizeof scales, scales, sizeof scales);
    } else {
        uint16_t halves[CHANNELS];
        for (int n = 0; n < CHANNELS; ++n) halves[n] = narrowed(scales[n]);
        __builtin_memcpy(place + group * sizeof halves, halves, sizeof halves);
    }
}

void pack(const float *weights, const Matrix &matrix, int first, int outputs, int threads) {
    Packing all{weights, matrix, first, outputs, Meeting(threads)};
    in_parallel(threads, [](void *work) {
        Packing &all = *static_cast<Packing *>(work);
        const Team team(all.meeting);
        team.each((all.outputs + CHANNELS - 1) / CHANNELS, [&](int at) {
            for (int g = 0; g < all.matrix.groups(); ++g) pack_group(all, at, g);
        });
    }, &all);
}

// Forwards.

#include "experts.hpp"
#include "forward.hpp"

}  // namespace

const Level LEVEL{multiply, compute, mix, pack};

}  // namespace rows
