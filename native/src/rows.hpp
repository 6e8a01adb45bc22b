// Products of a few rows with matrices of 4 or 8 bits, and forwards of whole models made of them.
//
// A forward over a few rows takes the time in which the weights come from memory, if the sums keep
// up. So weights stay small until they meet the sums: whole numbers of 4 or 8 bits, with a scale for
// each channel and group of inputs. The inputs of a product are rounded to 8 bits as well, with a
// scale for each row and GROUP of them, and multiplied as whole numbers.
//
// Weights are rounded here with groups of 128 in 8 bits, and of 32 in 4, where the rounding of large
// groups is felt. Weights that were rounded elsewhere keep their numbers: what llama.cpp calls Q8_0,
// Q4_0, Q4_1 and Q4_K has groups of 32, and GPTQ, AWQ and compressed-tensors have multiples of it.
//
// Invariant: a row has the same bits whatever stands beside it, and whatever instructions the
// processor has. Sums of whole numbers have no order, everything else is added in one order, and no
// product and sum are rounded together.
//
// rows.cpp is compiled once per set of instructions. What it uses of headers is static, see
// passes.hpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "team.hpp"

namespace rows {

constexpr int GROUP = 128, FINE = 32, CHANNELS = 16;
constexpr int padded(int inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }
// Tokens of a part of a cache, and of a block of its keys.
constexpr int PART = 256, BLOCK = 16;

// A matrix of `outputs` x `inputs` numbers. They lie in blocks of CHANNELS outputs, which have 4
// inputs of every channel behind each other; in 4 bits, a byte has those 4 and the next 4. They are
// 8 or 128 more than what they stand for. Scales have the shape (blocks, groups, CHANNELS): float16
// for groups of FINE inputs, float32 for groups of GROUP. Outputs are padded to a whole number of
// blocks, and inputs, which are whole groups of FINE, to whole groups of GROUP.
//
// With `lows`, which only fine groups have, 8 times its low is subtracted from each weight. Numbers of
// 4 bits then count from 0: a weight is its number times the scale, less 8 times its low. Lows have
// the shape of the scales, and those of a group stand behind its scales.
struct Matrix {
    int outputs, inputs, bits;
    bool fine, lows;
    uint8_t *numbers, *scales;
    const float *bias;

    int blocks() const { return (outputs + CHANNELS - 1) / CHANNELS; }
    int group() const { return fine ? FINE : GROUP; }
    int groups() const { return padded(inputs) / group(); }
    size_t block_bytes() const { return size_t(padded(inputs)) * CHANNELS * bits / 8; }
    size_t scale_bytes() const {
        return size_t(groups()) * CHANNELS * (fine ? 2 : 4) * (lows ? 2 : 1);
    }
    int width() const { return blocks() * CHANNELS; }
};

// The parts of a layer of a Llama-like model; what may be missing is a null pointer. A layer with a
// router, which has the shape (experts, width), is a mixture: the last three matrices have the
// outputs of all experts behind each other, whole blocks of each. A layer with a norm `beside` reads
// two rows side by side: the embedding of a token, normed by `before`, and the states, normed by
// `beside`.
struct Layer {
    const float *before, *between, *query_norm, *key_norm, *beside, *router;
    const Matrix *query, *key, *value, *output, *gate, *up, *down;
};

// `experts`, of which a row has `chosen`, have the inner width `small`. With `normalised` the shares
// of those chosen add up to 1. With `normed_states` a layer that reads two rows adds its results to
// the normed states.
struct Shape {
    int width, inner, heads, shared, size, vocabulary, experts, chosen, small;
    bool normalised, normed_states;
    float eps, scale;
};

struct Model {
    Shape shape;
    std::vector<Layer> layers;
    const float *norm;
    const Matrix *head;  // may be missing
    // Rotary factors by position, each (positions, size / 2).
    const float *cosines, *sines;
};

// The rows of one sequence in a forward, from row `first` on: `rows` nodes of a tree after `length`
// cached tokens. Its first `drafted` nodes were computed before, and are cached after those tokens.
// A row sees the tokens, itself and the nodes that `parents` leads to, which has a number for every
// node of the tree (-1: none). The parts of the cache have the shape (layers, 2, shared heads, PART x
// size), keys in blocks of (size, BLOCK).
struct Span {
    int first, rows, length, drafted;
    const int64_t *parents;
    std::vector<float *> parts;
};

// One forward over the rows of all spans. `states` holds their embeddings, or what layers read
// beside these, which are then `embedded`. `logits` has the shape (rows, width of the head), null if
// they are not needed. `taps` has a place for the states after each layer and after the last norm,
// null for those that are not needed.
struct Forward {
    int rows;
    float *states, *logits;
    const float *embedded;
    const int64_t *positions;
    std::vector<Span> spans;
    std::vector<float *> taps;
};

struct Level {
    // The product of `rows` rows of `inputs` numbers, into rows of `width()` numbers.
    void (*multiply)(const float *inputs, int rows, const Matrix &matrix, float *out, int threads);
    void (*compute)(const Model &model, Forward &forward, int threads);
    // What the chosen ones of `count` experts give for each row, by `shares`; `choices` and
    // `shares` have the shape (rows, chosen). Of the layer, only gate, up and down are read.
    void (*mix)(const Layer &layer, int count, const float *states, int rows,
                const int64_t *choices, const float *shares, int chosen, float *out, int threads);
    // Round some blocks of weights, rows of `inputs` numbers, into the same blocks of a matrix.
    void (*pack)(const float *weights, const Matrix &matrix, int first, int outputs, int threads);
};

extern const Level plain, avx2, avxvnni, avx512, amx, dotprod, i8mm;
// Those that this processor can run, by their names; the last one is the fastest.
std::vector<std::pair<std::string, const Level *>> find_levels();

}  // namespace rows
