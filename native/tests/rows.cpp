// Every set of instructions that this processor has, compared with plain C++ bit by bit.
//
// Names of sets, given as arguments, are those that it must have. The results have the same bits on
// every kind of processor: CHECKSUM is theirs.
#include "../src/rows.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

using namespace rows;

namespace {

constexpr int PRODUCTS = 300, MIXTURES = 12, FORWARDS = 24;
constexpr unsigned long long CHECKSUM = 0x32d3f4690ec77a77;

struct Random {
    uint64_t state = 1;
    uint32_t bits() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state >> 33);
    }
    int below(int count) { return int(bits() % uint32_t(count)); }
    int from(int first, int last) { return first + below(last - first + 1); }
    float number() { return float(int32_t(bits()) - (1 << 30)) * 0x1p-30f; }
    std::vector<float> numbers(size_t count) {
        std::vector<float> found(count);
        for (float &each : found) each = number();
        return found;
    }
};

Random random_;
std::vector<std::pair<std::string, const Level *>> levels = find_levels();
unsigned long long checksum = 14695981039346656037u;
int compared = 0;

[[noreturn]] void fail(const std::string &what) {
    std::printf("%s\n", what.c_str());
    std::exit(1);
}

// What is no number has no sign that counts.
void add_to_checksum(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) bits = 0x7FC00000;
    for (int i = 0; i < 4; ++i, bits >>= 8) checksum = (checksum ^ (bits & 255)) * 1099511628211u;
}

bool same(const std::vector<float> &left, const std::vector<float> &right) {
    for (size_t i = 0; i < left.size(); ++i)
        if (std::memcmp(&left[i], &right[i], sizeof(float)) != 0 &&
            (left[i] == left[i] || right[i] == right[i]))
            return false;
    return left.size() == right.size();
}

// What each level computes, with one thread and two.
template <class Compute>
std::vector<float> compare(const std::string &what, Compute compute) {
    std::vector<float> expected = compute(plain, 1);
    for (const auto &[name, level] : levels)
        for (int threads = 1; threads <= 2; ++threads)
            if (!same(compute(*level, threads), expected))
                fail(what + ": " + name + " differs with " + std::to_string(threads) + " threads");
    for (float each : expected) add_to_checksum(each);
    ++compared;
    return expected;
}

struct Kind {
    int bits;
    bool fine, lows;
};
constexpr Kind KINDS[] = {{8, false, false}, {8, true, false}, {8, true, true}, {4, true, false},
                          {4, true, true}};

// A matrix with its numbers, of which all may be the largest or the smallest.
struct Held {
    Matrix matrix;
    std::vector<uint8_t> numbers, scales;
    std::vector<float> bias;

    Held(int outputs, int inputs, Kind kind, bool biased)
        : matrix{outputs, inputs, kind.bits, kind.fine, kind.lows, nullptr, nullptr, nullptr} {
        const int extreme = random_.below(4);
        numbers.resize(matrix.blocks() * matrix.block_bytes());
        for (uint8_t &each : numbers)
            each = extreme > 1 ? uint8_t(random_.bits()) : extreme ? 255 : 0;
        scales.resize(matrix.blocks() * matrix.scale_bytes());
        for (size_t at = 0; at < scales.size(); at += kind.fine ? 2 : 4) {
            const float scale = random_.number() / 64;
            // float16 from 2^-14 to 2, of either sign.
            const uint16_t half = uint16_t(random_.below(2) << 15 | random_.from(0x400, 0x3FFF));
            if (kind.fine)
                std::memcpy(&scales[at], &half, sizeof half);
            else
                std::memcpy(&scales[at], &scale, sizeof scale);
        }
        if (biased) bias = random_.numbers(size_t(matrix.width()));
        matrix.numbers = numbers.data();
        matrix.scales = scales.data();
        matrix.bias = biased ? bias.data() : nullptr;
    }
    Held(const Held &) = delete;
};

// Rows of ordinary numbers, and some of one size, of zeros, of tiny numbers, or with an infinity.
std::vector<float> rows_of(int rows, int inputs, bool odd) {
    std::vector<float> values = random_.numbers(size_t(rows) * inputs);
    for (int row = 0; odd && row < rows; ++row) {
        float *each = &values[size_t(row) * inputs];
        const int kind = random_.below(8), at = random_.below(inputs);
        for (int i = 0; i < inputs; ++i) {
            if (kind == 0) each[i] = 0.0f;
            if (kind == 1) each[i] = 3.0f;
            if (kind == 2) each[i] = each[i] < 0 ? -1e30f : 1e30f;
            if (kind == 3) each[i] *= 1e-38f;
        }
        if (kind == 4) each[at] = std::numeric_limits<float>::infinity();
        if (kind == 5) each[at] = std::numeric_limits<float>::quiet_NaN();
    }
    return values;
}

// A few rows, and sometimes so many that tiles are worth it for every kind of weights.
int rows_for(int number) {
    return number % 6 == 5 ? 32 + number / 6 % 18 : 1 + number % 17;
}

void test_product(int number) {
    const Kind kind = KINDS[number % 5];
    const int rows = rows_for(number), inputs = FINE * random_.from(1, 13);
    const Held held(random_.from(1, 70), inputs, kind, number % 2);
    const Matrix &matrix = held.matrix;
    const std::vector<float> values = rows_of(rows, inputs, number % 3 == 0);
    const std::string what = std::to_string(matrix.outputs) + " x " + std::to_string(inputs) +
                             " weights of " + std::to_string(kind.bits) + " bits with " +
                             std::to_string(rows) + " rows";
    const size_t width = size_t(matrix.width());
    const std::vector<float> all = compare(what, [&](const Level &level, int threads) {
        std::vector<float> out(rows * width);
        level.multiply(values.data(), rows, matrix, out.data(), threads);
        return out;
    });
    for (const auto &[name, level] : levels)
        for (int row = 0; row < rows; ++row) {
            std::vector<float> out(width);
            level->multiply(&values[size_t(row) * inputs], 1, matrix, out.data(), 1);
            if (!same(out, {&all[row * width], &all[row * width] + width}))
                fail(what + ": " + name + " gives a row other bits where it is alone");
        }
}

void test_packing(int number) {
    const Kind kind = KINDS[number % 2 ? 3 : 0];
    const int outputs = random_.from(1, 70), inputs = FINE * random_.from(1, 9);
    const std::vector<float> weights = rows_of(outputs, inputs, number % 3 == 0);
    Held held(outputs, inputs, kind, false);
    compare("packing", [&](const Level &level, int threads) {
        std::fill(held.numbers.begin(), held.numbers.end(), uint8_t(0));
        std::fill(held.scales.begin(), held.scales.end(), uint8_t(0));
        level.pack(weights.data(), held.matrix, 0, outputs, threads);
        std::vector<float> found(held.numbers.begin(), held.numbers.end());
        found.insert(found.end(), held.scales.begin(), held.scales.end());
        return found;
    });
}

void test_mixture(int number) {
    const int experts = random_.from(2, 7), chosen = random_.from(1, 2);
    const int rows = number % 4 ? rows_for(number) : 40 * experts + number;
    const int width = FINE * random_.from(1, 5), inner = FINE * random_.from(1, 5);
    const Kind kind = KINDS[number % 5], other = KINDS[random_.below(5)];
    const Held gate(experts * inner, width, kind, false), up(experts * inner, width, other, false);
    const Held down(experts * width, inner, kind, false);
    Layer layer{};
    layer.gate = &gate.matrix, layer.up = &up.matrix, layer.down = &down.matrix;
    std::vector<int64_t> choices;
    for (int i = 0; i < rows * chosen; ++i) choices.push_back(random_.below(experts));
    const std::vector<float> states = random_.numbers(size_t(rows) * width);
    const std::vector<float> shares = random_.numbers(choices.size());
    compare("a mixture", [&](const Level &level, int threads) {
        std::vector<float> out(states.size());
        level.mix(layer, experts, states.data(), rows, choices.data(), shares.data(), chosen,
                  out.data(), threads);
        return out;
    });
}

// A tree of rows after some cached tokens.
struct Sequence {
    int rows, length;
    std::vector<float> states, parts;
    std::vector<int64_t> positions, parents;

    Sequence(const Shape &shape, int rows)
        : rows(rows), length(random_.below(2 * PART - rows)),
          states(random_.numbers(size_t(rows) * shape.width)),
          parts(random_.numbers(size_t(2 * 2 * shape.shared) * PART * shape.size)) {
        for (int row = 0; row < rows; ++row) {
            parents.push_back(row ? random_.below(row) : -1);
            positions.push_back(row ? positions[size_t(parents[row])] + 1 : length);
        }
    }
};

// The logits, states, taps and caches of some sequences in one forward, those of each in turn.
std::vector<float> forward_of(const Level &level, int threads, const Model &model,
                              std::vector<Sequence> sequences) {
    const size_t width = size_t(model.shape.width), outputs = size_t(model.head->width());
    std::vector<float> states;
    std::vector<int64_t> positions;
    Forward forward{};
    for (Sequence &each : sequences) {
        float *parts = each.parts.data();
        forward.spans.push_back({forward.rows, each.rows, each.length, 0, each.parents.data(),
                                 {parts, parts + each.parts.size() / 2}});
        forward.rows += each.rows;
        states.insert(states.end(), each.states.begin(), each.states.end());
        positions.insert(positions.end(), each.positions.begin(), each.positions.end());
    }
    std::vector<float> logits(forward.rows * outputs), tap(states.size());
    forward.states = states.data(), forward.logits = logits.data();
    forward.positions = positions.data();
    forward.taps = {nullptr, tap.data()};
    level.compute(model, forward, threads);
    std::vector<float> found;
    for (size_t i = 0; i < sequences.size(); ++i) {
        const Span &span = forward.spans[i];
        const size_t first = size_t(span.first), end = first + size_t(span.rows);
        found.insert(found.end(), &logits[first * outputs], &logits[0] + end * outputs);
        found.insert(found.end(), &states[first * width], &states[0] + end * width);
        found.insert(found.end(), &tap[first * width], &tap[0] + end * width);
        found.insert(found.end(), sequences[i].parts.begin(), sequences[i].parts.end());
    }
    return found;
}

// One layer, and an output matrix, over the rows of up to four sequences: each of them gets what it
// gets alone.
void test_forward(int number) {
    const int size = 32 << number % 4, shared = random_.from(1, 2), heads = shared << number % 4;
    const int width = FINE * random_.from(1, 5), inner = FINE * random_.from(1, 5);
    const int experts = number % 3 == 2 ? 5 : 0, many = experts ? experts : 1;
    const Kind kind = KINDS[number % 5], other = KINDS[random_.below(5)];
    const Held query(heads * size, width, kind, true), key(shared * size, width, kind, false);
    const Held value(shared * size, width, other, false), output(width, heads * size, kind, false);
    const Held gate(many * inner, width, kind, false), up(many * inner, width, other, false);
    const Held down(many * width, inner, kind, false), head(50, width, kind, false);
    const std::vector<float> norms = random_.numbers(size_t(2 * width + 2 * size));
    const std::vector<float> router = random_.numbers(size_t(many) * width);
    const bool normed = number % 2;
    Model model{};
    model.shape = {width, inner, heads,  shared, size,  50,
                   experts, 2,   inner, normed, false, 1e-6f, 0.2f};
    model.layers = {{&norms[0], &norms[width], normed ? &norms[2 * width] : nullptr,
                     normed ? &norms[2 * width + size] : nullptr, nullptr,
                     experts ? router.data() : nullptr, &query.matrix, &key.matrix, &value.matrix,
                     &output.matrix, &gate.matrix, &up.matrix, &down.matrix}};
    const std::vector<float> factors = random_.numbers(size_t(2 * PART) * size / 2);
    model.norm = &norms[0], model.head = &head.matrix;
    model.cosines = model.sines = factors.data();
    std::vector<Sequence> sequences;
    for (int i = 0; i <= number / 2 % 4; ++i)
        sequences.emplace_back(model.shape, random_.from(1, i == 3 ? 40 : 9));
    const std::vector<float> all = compare("a forward", [&](const Level &level, int threads) {
        return forward_of(level, threads, model, sequences);
    });
    std::vector<float> alone;
    for (const Sequence &each : sequences) {
        const std::vector<float> own = forward_of(plain, 1, model, {each});
        alone.insert(alone.end(), own.begin(), own.end());
    }
    if (!same(alone, all)) fail("a sequence has other bits where it is alone");
}

// A layer that reads embeddings beside states, over the rows of a tree: as many of them as are
// drafted first, then the others. The order of computing makes no difference.
std::vector<float> levels_of(const Level &level, int threads, const Model &model,
                             Sequence sequence, const std::vector<float> &embedded, int drafted) {
    const size_t width = size_t(model.shape.width);
    float *parts = sequence.parts.data();
    for (int first = 0, end = drafted; first < sequence.rows; first = end, end = sequence.rows) {
        Forward forward{};
        forward.rows = end - first;
        forward.states = sequence.states.data() + first * width;
        forward.embedded = embedded.data() + first * width;
        forward.positions = sequence.positions.data() + first;
        forward.spans = {{0, end - first, sequence.length, first, sequence.parents.data(),
                          {parts, parts + sequence.parts.size() / 2}}};
        forward.taps = {nullptr, nullptr};
        level.compute(model, forward, threads);
    }
    std::vector<float> found = sequence.states;
    found.insert(found.end(), sequence.parts.begin(), sequence.parts.end());
    return found;
}

void test_pairs(int number) {
    const int size = 32 << number % 3, shared = 1 + number % 2, heads = 2 * shared;
    const int width = FINE * random_.from(1, 5), inner = FINE * random_.from(1, 5);
    const Kind kind = KINDS[number % 5];
    const Held query(heads * size, 2 * width, kind, true);
    const Held key(shared * size, 2 * width, kind, false);
    const Held value(shared * size, 2 * width, kind, false);
    const Held output(width, heads * size, kind, false), gate(inner, width, kind, false);
    const Held up(inner, width, kind, false), down(width, inner, kind, false);
    const std::vector<float> norms = random_.numbers(size_t(3 * width));
    const std::vector<float> factors = random_.numbers(size_t(2 * PART) * size / 2);
    Model model{};
    model.shape = {width, inner, heads, shared, size,  50, 0, 0, 0,
                   false, number % 2 == 1, 1e-6f, 0.2f};
    model.layers = {{&norms[0], &norms[width], nullptr, nullptr, &norms[2 * width], nullptr,
                     &query.matrix, &key.matrix, &value.matrix, &output.matrix, &gate.matrix,
                     &up.matrix, &down.matrix}};
    model.norm = &norms[0];
    model.cosines = model.sines = factors.data();
    const Sequence sequence(model.shape, 2 + number % 8);
    const std::vector<float> embedded = random_.numbers(sequence.states.size());
    const std::vector<float> at_once = compare("a head", [&](const Level &level, int threads) {
        return levels_of(level, threads, model, sequence, embedded, sequence.rows);
    });
    const int drafted = 1 + number % (sequence.rows - 1);
    if (!same(levels_of(plain, 1, model, sequence, embedded, drafted), at_once))
        fail("a level has other bits where the levels above were computed before");
}

}  // namespace

int main(int count, char **names) {
    std::string found, wanted;
    for (const auto &each : levels) found += " " + each.first;
    for (int i = 1; i < count; ++i) wanted += std::string(" ") + names[i];
    if (count > 1 && found != wanted) fail("this processor has" + found + ", not" + wanted);
    for (int number = 0; number < PRODUCTS; ++number) test_product(number);
    for (int number = 0; number < MIXTURES; ++number) test_packing(number), test_mixture(number);
    for (int number = 0; number < FORWARDS; ++number) test_forward(number);
    for (int number = 0; number < FORWARDS; ++number) test_pairs(number);
    if (checksum != CHECKSUM) {
        std::printf("checksum: %016llx\n", checksum);
        fail("the results are not those of other processors");
    }
    std::printf("%d results are equal with%s\n", compared, found.c_str());
}
