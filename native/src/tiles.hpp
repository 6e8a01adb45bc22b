// Products with AMX, as a part of rows.cpp: an instruction adds the products of 16 rows with 16
// channels over 64 inputs, or over 32.
#pragma once

// The shapes of the tiles, as the processor reads them: its version, the bytes of a row of each tile,
// and its rows. Tiles 0 to 3 have sums; 4 has 64 inputs of rows, 5 has 32; 6 and 7 have weights of as
// many inputs.
alignas(64) static const uint8_t SHAPES[64] = {
    1,    0,    0,    0,    0,    0,    0,    0, 0,  0, 0,    0, 0,  0, 0, 0,  //
    64,   0,    64,   0,    64,   0,    64,   0, 64, 0, FINE, 0, 64, 0, 64, 0,  //
    0,    0,    0,    0,    0,    0,    0,    0, 0,  0, 0,    0, 0,  0, 0, 0,  //
    TILE, TILE, TILE, TILE, TILE, TILE, SLAB, FINE / STEP};

// Tiles are a thread's from here to the end of the scope, if it needs any.
struct Tiles {
    const bool any;
    explicit Tiles(bool any) : any(any) {
        if (any) _tile_loadconfig(SHAPES);
    }
    ~Tiles() {
        if (any) _tile_release();
    }
    Tiles(const Tiles &) = delete;
};

static thread_local Room opened_weights;

// The weights of a block as whole numbers with signs, in 8 bits.
template <int BITS, bool LOWS>
INLINE const uint8_t *opened(const uint8_t *from, int inputs) {
    const size_t bytes = size_t(inputs) * CHANNELS;
    uint8_t *to = (uint8_t *)aligned(opened_weights.of(bytes + 64));
    const __m512i zero = _mm512_set1_epi8(BITS == 8 ? -128 : LOWS ? 0 : 8);
    for (size_t i = 0; i < bytes; from += 64) {
        const Weights both = weights(from);
        if (BITS == 8) {
            _mm512_store_si512(to + i, _mm512_xor_si512(both, zero));
            i += 64;
        } else {
            _mm512_store_si512(to + i, _mm512_sub_epi8(low(both), zero));
            _mm512_store_si512(to + i + 64, _mm512_sub_epi8(high(both), zero));
            i += 128;
        }
    }
    __asm__ __volatile__("" : : : "memory");  // compilers take no notice of what tiles read
    return to;
}

constexpr int TILED = TILE * CHANNELS;

// The sums of TILE rows over a GROUP of inputs, for each SPAN of it. SIGNED weights were opened.
template <int SPAN, bool SIGNED>
INLINE void multiply_tiles(const uint8_t *from, const Inputs &inputs, int row, int group,
                           int32_t *sums) {
    const int32_t *words = inputs.words + (size_t(group) * 2 * inputs.lines + row) * SLAB;
    const int32_t *next = words + size_t(inputs.lines) * SLAB;
#define ADD(SUM, ROWS, WEIGHTS, words, from)                                                      \
    _tile_loadd(ROWS, words, 64);                                                                 \
    _tile_loadd(WEIGHTS, from, 64);                                                               \
    if (SIGNED)                                                                                   \
        _tile_dpbssd(SUM, ROWS, WEIGHTS);                                                         \
    else                                                                                          \
        _tile_dpbsud(SUM, ROWS, WEIGHTS);
    _tile_zero(0);
    if (SPAN == GROUP) {
        ADD(0, 4, 6, words, from)
        ADD(0, 4, 6, next, from + GROUP / 2 * CHANNELS)
        _tile_stored(0, sums, 64);
    } else {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        ADD(0, 5, 7, words, from)
        ADD(1, 5, 7, words + FINE / STEP, from + FINE * CHANNELS)
        ADD(2, 5, 7, next, from + 2 * FINE * CHANNELS)
        ADD(3, 5, 7, next + FINE / STEP, from + 3 * FINE * CHANNELS)
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + TILED, 64);
        _tile_stored(2, sums + 2 * TILED, 64);
        _tile_stored(3, sums + 3 * TILED, 64);
    }
#undef ADD
}

// Asks for some of the next block's weights, as each strip does in each group: a block has to be
// there as a whole before its first sums.
struct Ahead {
    const uint8_t *next;
    int bytes;

    Ahead(const Matrix &matrix, const Inputs &inputs, int at)
        : next(matrix.numbers + size_t(at + 1) * matrix.block_bytes()) {
        const int strips = (inputs.rows + TILE - 1) / TILE, groups = inputs.count / GROUP;
        bytes = (int(matrix.block_bytes()) / groups / strips + 63) / 64 * 64;
    }
    INLINE void ask() {
        for (int i = 0; i < bytes; i += 64, next += 64) _mm_prefetch((const char *)next, _MM_HINT_T1);
    }
};

// The sums of TILE rows, from `row` on, with a block of channels, into rows of CHANNELS.
//
// The sums of a group are read once those of the next are on their way: a load waits until all that
// a tile has stored is in the cache.
template <int SPAN, bool LOWS, bool SIGNED>
INLINE void strip(const uint8_t *from, const uint8_t *scales, const Inputs &inputs, int row,
                  Ahead &ahead, float *found) {
    constexpr int SPANS = GROUP / SPAN;
    const size_t lines = inputs.lines;
    const int groups = inputs.count / GROUP;
    Floats total[TILE];
    for (int m = 0; m < TILE; ++m) total[m] = Floats{};
    alignas(64) int32_t sums[2][SPANS * TILED];
    multiply_tiles<SPAN, SIGNED>(from, inputs, row, 0, sums[0]);
    for (int group = 0; group < groups; ++group) {
        ahead.ask();
        from += GROUP * CHANNELS;
        if (group + 1 < groups)
            multiply_tiles<SPAN, SIGNED>(from, inputs, row, group + 1, sums[(group + 1) % 2]);
        const float *each = inputs.scales + group * lines + row;
        const int32_t *less = inputs.sums + group * (GROUP / FINE) * lines + row;
        for (int span = 0; span < SPANS; ++span, less += lines) {
            const int32_t *here = sums[group % 2] + span * TILED;
            const Floats scale = scales_at<SPAN>(scales);
            scales += CHANNELS * (SPAN == FINE ? 2 : 4);
            int32_t first[TILE];
            if (!SIGNED) {
                Whole all = {};
                for (int i = 0; i < SPAN / FINE; ++i) all += load_lanes<Whole>(less + i * lines);
                store(first, all * 16);
            }
            for (int m = 0; m < TILE; ++m) {
                Whole sum = load_lanes<Whole>(here + m * CHANNELS);
                if (!SIGNED) sum += first[m];
                total[m] += floats(sum) * (scale * each[m]);
            }
            if (LOWS) {
                const Floats lows = load_halves(scales);
                scales += CHANNELS * 2;
                float shares[TILE];
                store(shares, floats(load_lanes<Whole>(less)) * load(each));
                for (int m = 0; m < TILE; ++m) total[m] += lows * shares[m];
            }
        }
    }
    for (int m = 0; m < TILE; ++m) store(found + m * CHANNELS, total[m]);
}

// The sums of all rows with a block of channels. The last strip may begin with rows of the one
// before. A single strip takes weights of 8 bits as they are.
template <int BITS, int SPAN, bool LOWS>
INLINE void block_in_tiles(const Matrix &matrix, const Inputs &inputs, int at, float *out,
                           bool onto) {
    const uint8_t *from = matrix.numbers + at * matrix.block_bytes();
    const uint8_t *scales = matrix.scales + at * matrix.scale_bytes();
    const bool once = BITS == 8 && inputs.rows <= TILE;
    if (!once) from = opened<BITS, LOWS>(from, inputs.count);
    Ahead ahead(matrix, inputs, at);
    for (int first = 0; first < inputs.rows; first += TILE) {
        const int row = first + TILE <= inputs.lines ? first : inputs.lines - TILE;
        float found[TILED];
        if (once)
            strip<SPAN, LOWS, false>(from, scales, inputs, row, ahead, found);
        else
            strip<SPAN, LOWS, true>(from, scales, inputs, row, ahead, found);
        for (int m = first - row; m < TILE && row + m < inputs.rows; ++m) {
            float *to = out + size_t(row + m) * matrix.width() + at * CHANNELS;
            Floats here = load(found + m * CHANNELS);
            if (matrix.bias) here += load(matrix.bias + at * CHANNELS);
            store(to, onto ? load(to) + here : here);
        }
    }
}
