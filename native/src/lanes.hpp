// CHANNELS numbers that are computed with together, as a part of rows.cpp.
//
// GCC keeps vectors that are wider than a register in memory. So lanes that need several registers
// are pairs of halves, down to vectors that fit. What is computed does not depend on it.
#pragma once

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define REGISTER 64
#elif defined(__AVX2__)
#define REGISTER 32
#else
#define REGISTER 16
#endif

template <class Half>
struct Pair {
    Half low, high;
};

template <class Vector>
struct Wide {
#if REGISTER == 64
    typedef Vector Lanes;
#elif REGISTER == 32
    typedef Pair<Vector> Lanes;
#else
    typedef Pair<Pair<Vector>> Lanes;
#endif
};

typedef float FloatVector __attribute__((vector_size(REGISTER)));
typedef int32_t WholeVector __attribute__((vector_size(REGISTER)));
typedef uint32_t WordVector __attribute__((vector_size(REGISTER)));
typedef int8_t ByteVector __attribute__((vector_size(REGISTER / 4)));
typedef Wide<FloatVector>::Lanes Floats;
typedef Wide<WholeVector>::Lanes Whole;
constexpr int LANES = CHANNELS;

template <class Lanes>
INLINE Lanes load_lanes(const void *from) {
    if constexpr (sizeof(Lanes) > REGISTER) {
        typedef decltype(Lanes::low) Half;
        return {load_lanes<Half>(from), load_lanes<Half>((const char *)from + sizeof(Half))};
    } else {
        Lanes lanes;
        __builtin_memcpy(&lanes, from, sizeof lanes);
        return lanes;
    }
}

INLINE Floats load(const float *from) { return load_lanes<Floats>(from); }

template <class Number, class Vector>
INLINE void store(Number *to, const Vector &lanes) {
    __builtin_memcpy(to, &lanes, sizeof lanes);
}

template <class Number, class Half>
INLINE void store(Number *to, const Pair<Half> &lanes) {
    store(to, lanes.low);
    store(to + sizeof(Half) / sizeof(Number), lanes.high);
}

// Operators of two lanes, and of lanes and a number.
#define OPERATOR(OP)                                                                              \
    template <class Half>                                                                         \
    INLINE auto operator OP(const Pair<Half> &a, const Pair<Half> &b) {                           \
        return Pair<decltype(a.low OP b.low)>{a.low OP b.low, a.high OP b.high};                  \
    }                                                                                             \
    template <class Half, class Number>                                                           \
    INLINE auto operator OP(const Pair<Half> &a, Number b) {                                      \
        return Pair<decltype(a.low OP b)>{a.low OP b, a.high OP b};                               \
    }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
OPERATOR(&)
OPERATOR(<)
OPERATOR(>)
#undef OPERATOR

template <class Half>
INLINE Pair<Half> operator-(const Pair<Half> &lanes) {
    return {-lanes.low, -lanes.high};
}

template <class Half>
INLINE void operator+=(Pair<Half> &a, const Pair<Half> &b) {
    a.low += b.low;
    a.high += b.high;
}

// By lane, `yes` where a comparison holds.
template <class Mask, class Vector>
INLINE Vector pick(const Mask &holds, const Vector &yes, const Vector &no) {
    return holds ? yes : no;
}

template <class Mask, class Half>
INLINE Pair<Half> pick(const Pair<Mask> &holds, const Pair<Half> &yes, const Pair<Half> &no) {
    return {pick(holds.low, yes.low, no.low), pick(holds.high, yes.high, no.high)};
}

INLINE float added(const Floats &lanes) {
    float values[LANES];
    store(values, lanes);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) values[i] += values[i + half];
    return values[0];
}

template <class Number, class Lanes>
INLINE Number largest(const Lanes &lanes) {
    Number values[LANES];
    store(values, lanes);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i)
            values[i] = values[i] > values[i + half] ? values[i] : values[i + half];
    return values[0];
}

// What is done to each register of some lanes.
#define BY_REGISTER(NAME)                                                                         \
    template <class Half>                                                                         \
    INLINE auto NAME(const Pair<Half> &lanes) {                                                   \
        return Pair<decltype(NAME(lanes.low))>{NAME(lanes.low), NAME(lanes.high)};                \
    }

INLINE FloatVector floats(WholeVector lanes) { return __builtin_convertvector(lanes, FloatVector); }
BY_REGISTER(floats)

// The nearest whole numbers, the even one of two, of numbers below 2^22.
INLINE WholeVector rounded(FloatVector lanes) {
    const FloatVector shifted = lanes + 12582912.0f;
    return (WholeVector)shifted - 0x4B400000;
}
BY_REGISTER(rounded)

INLINE FloatVector exponential(FloatVector lanes) {
    return passes::exponential<FloatVector, WordVector>(lanes);
}
BY_REGISTER(exponential)
#undef BY_REGISTER

// Numbers that fit into bytes.
#if defined(__ARM_FEATURE_DOTPROD)
INLINE void store_bytes(int8_t *to, const Whole &lanes) {
    const int16x8_t low = vcombine_s16(vmovn_s32(lanes.low.low), vmovn_s32(lanes.low.high));
    const int16x8_t high = vcombine_s16(vmovn_s32(lanes.high.low), vmovn_s32(lanes.high.high));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
#else
INLINE void store_bytes(int8_t *to, WholeVector lanes) {
    store(to, __builtin_convertvector(lanes, ByteVector));
}
template <class Half>
INLINE void store_bytes(int8_t *to, const Pair<Half> &lanes) {
    store_bytes(to, lanes.low);
    store_bytes(to + sizeof(Half) / 4, lanes.high);
}
#endif

// 16 numbers in float16.
INLINE Floats load_halves(const uint8_t *from) {
#if REGISTER == 64
    // GCC warns of what _mm512_cvtph_ps does not initialise.
    return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256((const __m256i *)from));
#elif REGISTER == 32
    const __m128i *at = (const __m128i *)from;
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
#elif defined(__ARM_FEATURE_DOTPROD)
    const auto four = [&](int at) {
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 2 * at)));
    };
    return {{four(0), four(4)}, {four(8), four(12)}};
#else
    // As 32 bits: the exponent of float16 begins at -14 instead of -126.
    uint16_t halves[LANES];
    float values[LANES];
    __builtin_memcpy(halves, from, sizeof halves);
    for (int i = 0; i < LANES; ++i) {
        const uint32_t size = (halves[i] & 0x7FFFu) << 13, sign = (halves[i] & 0x8000u) << 16;
        const bool odd = size >= 0x0F800000;  // infinity and NaN
        const uint32_t finite = passes::as<uint32_t>(passes::as<float>(size) * 0x1p112f);
        values[i] = passes::as<float>(sign | (odd ? size | 0x7F800000 : finite));
    }
    return load(values);
#endif
}
