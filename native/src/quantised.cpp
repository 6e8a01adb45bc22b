// Matrices of 4 and 8 bits and forwards of models made of them, as Python sees them.
#include "rows.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "module.hpp"

namespace nb = nanobind;

namespace {

using namespace rows;

template <class Number, int Dimensions>
using Array = nb::ndarray<Number, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Vector = Array<float, 1>;
using Rows = Array<float, 2>;
using Indices = Array<const int64_t, 1>;

const auto known = find_levels();
const Level *level = known.back().second;

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const auto &each : known) names.push_back(each.first);
    return names;
}

void use_level(const std::string &name) {
    for (const auto &[each, found] : known)
        if (each == name) {
            level = found;
            return;
        }
    throw std::invalid_argument("this processor does not have " + name);
}

void check(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(what);
}

// Rows of numbers as a file has them: in blocks of `size` bytes, numbers in `count` bytes from `at`
// on. In 4 bits, the lower halves of `half` bytes stand before their upper halves.
struct Stored {
    const uint8_t *rows;
    size_t row_bytes;
    int size, at, count, half, bits;

    int together() const { return count * 8 / bits; }
    // The numbers of one block of a row, from 0 on.
    void read(int64_t row, int block, uint8_t *numbers) const {
        const uint8_t *from = rows + row * row_bytes + size_t(block) * size + at;
        if (bits == 8) {
            for (int i = 0; i < count; ++i) numbers[i] = from[i] ^ 128;
            return;
        }
        for (int part = 0; part < count; part += half, from += half, numbers += 2 * half)
            for (int i = 0; i < half; ++i) {
                numbers[i] = from[i] & 15;
                numbers[half + i] = from[i] >> 4;
            }
    }
};

constexpr int MOST_TOGETHER = 256;

// Work that is shared among threads.
struct Placing {
    const Stored &stored;
    const Matrix &matrix;
    const int64_t *order;
    Meeting meeting;
};

// Put one block of outputs where the products read it.
void place_block(const Placing &all, int at) {
    const Matrix &matrix = all.matrix;
    const int together = all.stored.together(), bits = matrix.bits;
    uint8_t *to = matrix.numbers + at * matrix.block_bytes();
    uint8_t *end = to + matrix.block_bytes();
    uint8_t numbers[CHANNELS][MOST_TOGETHER] = {};
    const int outputs = std::min(CHANNELS, matrix.outputs - at * CHANNELS);
    for (int block = 0; block < matrix.inputs / together; ++block) {
        for (int n = 0; n < outputs; ++n)
            all.stored.read(all.order[at * CHANNELS + n], block, numbers[n]);
        for (int k = 0; k < together; k += 32 / bits)
            for (const uint8_t *each : numbers) {
                uint32_t four, next;
                std::memcpy(&four, each + k, 4);
                std::memcpy(&next, each + k + (bits == 4 ? 4 : 0), 4);
                if (bits == 4) four |= next << 4;
                std::memcpy(to, &four, 4);
                to += 4;
            }
    }
    std::fill(to, end, uint8_t(0));
}

// A matrix with the arrays that hold it.
struct Held {
    Matrix matrix;
    Array<uint8_t, 1> numbers, scales;
    std::optional<Vector> bias;

    Held(int outputs, int inputs, int bits, bool fine, bool lows, Array<uint8_t, 1> numbers,
         Array<uint8_t, 1> scales, std::optional<Vector> bias)
        : matrix{outputs, inputs, bits, fine, lows, numbers.data(), scales.data(),
                 bias ? bias->data() : nullptr},
          numbers(numbers), scales(scales), bias(bias) {
        check(bits == 4 || bits == 8, "a number has 4 or 8 bits");
        check(bits == 8 || fine, "in 4 bits groups are fine");
        check(fine || !lows, "only fine groups have lows");
        check(outputs > 0 && inputs > 0 && inputs % FINE == 0, "the inputs are no whole groups");
        check(numbers.size() == matrix.blocks() * matrix.block_bytes(), "the numbers do not fit");
        check(scales.size() == matrix.blocks() * matrix.scale_bytes(), "the scales do not fit");
        check(!bias || bias->size() == size_t(matrix.width()), "the bias does not fit");
    }

    // Round the outputs from `first` on.
    void pack(Array<const float, 2> weights, int first, int threads) {
        check(matrix.fine == (matrix.bits == 4) && !matrix.lows, "this is rounded elsewhere");
        check(int(weights.shape(1)) == matrix.inputs && first >= 0 && first % CHANNELS == 0 &&
                  first + int64_t(weights.shape(0)) <= matrix.outputs,
              "the weights do not fit");
        level->pack(weights.data(), matrix, first / CHANNELS, int(weights.shape(0)), threads);
    }

    // Take numbers that were rounded elsewhere: output i has those of row `order[i]`.
    void place(Array<const uint8_t, 2> rows, Indices order, int size, int at, int count, int half,
               int threads) {
        const Stored stored{rows.data(), rows.shape(1), size, at, count, half, matrix.bits};
        const int together = stored.together();
        check(size > 0 && at >= 0 && count > 0 && at + count <= size &&
                  together <= MOST_TOGETHER && together % FINE == 0 &&
                  (matrix.bits == 8 || (half > 0 && count % half == 0)),
              "such blocks are not known");
        check(rows.shape(1) % size == 0 &&
                  rows.shape(1) / size * together == size_t(matrix.inputs) &&
                  order.size() == size_t(matrix.outputs),
              "the rows do not fit");
        for (size_t i = 0; i < order.size(); ++i)
            check(order.data()[i] >= 0 && order.data()[i] < int64_t(rows.shape(0)),
                  "a row is missing");
        Placing all{stored, matrix, order.data(), Meeting(threads)};
        in_parallel(threads, [](void *work) {
            Placing &all = *static_cast<Placing *>(work);
            Team(all.meeting).each(all.matrix.blocks(), [&](int at) { place_block(all, at); });
        }, &all);
    }

    void multiply(Array<const float, 2> values, Rows out, int threads) const {
        check(int(values.shape(1)) == matrix.inputs && out.shape(0) == values.shape(0) &&
                  int(out.shape(1)) == matrix.width(),
              "the rows do not fit");
        level->multiply(values.data(), int(values.shape(0)), matrix, out.data(), threads);
    }
};

// What the chosen experts give for some rows, by the shares of their choices.
void mix(const Held &gate, const Held &up, const Held &down, int count,
         Array<const float, 2> states, Array<const int64_t, 2> choices,
         Array<const float, 2> shares, Rows out, int threads) {
    const Matrix &first = gate.matrix, &second = up.matrix, &last = down.matrix;
    check(count > 0 && first.outputs == count * last.inputs && first.outputs == second.outputs &&
              first.inputs == second.inputs && last.outputs == count * first.inputs,
          "the experts do not fit");
    const size_t rows = states.shape(0), chosen = choices.shape(1);
    check(int(states.shape(1)) == first.inputs && out.shape(0) == rows &&
              int(out.shape(1)) == first.inputs && choices.shape(0) == rows &&
              shares.shape(0) == rows && shares.shape(1) == chosen,
          "the rows do not fit");
    for (size_t i = 0; i < choices.size(); ++i)
        check(choices.data()[i] >= 0 && choices.data()[i] < count, "there is no such expert");
    Layer layer{};
    layer.gate = &first, layer.up = &second, layer.down = &last;
    level->mix(layer, count, states.data(), int(rows), choices.data(), shares.data(), int(chosen),
               out.data(), threads);
}

// A model with the objects that hold its weights and factors.
struct Decoder {
    Model model;
    nb::object held;
    Rows cosines, sines;

    // `layers` are lists of 5 norms and a router, of which the last four may be None, and 7
    // matrices.
    Decoder(std::vector<int> sizes, bool normalised, bool normed_states, float eps, float scale,
            nb::list layers, Vector norm, const Held *head, Rows cosines, Rows sines,
            nb::object held)
        : held(std::move(held)), cosines(cosines), sines(sines) {
        check(sizes.size() == 9, "there are nine sizes");
        model.shape = {sizes[0], sizes[1], sizes[2], sizes[3],   sizes[4],      sizes[5], sizes[6],
                       sizes[7], sizes[8], normalised, normed_states, eps, scale};
        const Shape &shape = model.shape;
        check(shape.chosen >= 0 && shape.chosen <= shape.experts, "the experts do not fit");
        check(shape.size == 32 || shape.size == 64 || shape.size == 128 || shape.size == 256,
              "heads of this size are not known");
        check(shape.shared > 0 && shape.heads > 0 && shape.heads % shape.shared == 0,
              "the heads are no whole groups");
        const int attended = shape.heads * shape.size, keys = shape.shared * shape.size;
        for (nb::handle each : layers) {
            nb::sequence parts = nb::cast<nb::sequence>(each);
            check(nb::len(parts) == 13, "a layer has thirteen parts");
            Layer layer{};
            const float **norms[] = {&layer.before, &layer.between, &layer.query_norm,
                                     &layer.key_norm, &layer.beside, &layer.router};
            const int numbers[] = {shape.width, shape.width, shape.size, shape.size, shape.width,
                                   shape.experts * shape.width};
            const Matrix **matrices[] = {&layer.query, &layer.key, &layer.value, &layer.output,
                                         &layer.gate, &layer.up, &layer.down};
            for (int i = 0; i < 6; ++i) {
                if (i >= 2 && nb::object(parts[i]).is_none()) continue;
                Vector found;
                check(nb::try_cast<Vector>(parts[i], found, false) &&
                          int(found.size()) == numbers[i],
                      i < 5 ? "a norm does not fit" : "a router does not fit");
                *norms[i] = found.data();
            }
            const int many = layer.router ? shape.experts : 1;
            const int inner = layer.router ? shape.small : shape.inner;
            const int read = layer.beside ? 2 * shape.width : shape.width;
            check(model.layers.empty() || !model.layers[0].beside == !layer.beside,
                  "all layers read the same");
            const int shapes[][2] = {{attended, read},            {keys, read},
                                     {keys, read},                {shape.width, attended},
                                     {many * inner, shape.width}, {many * inner, shape.width},
                                     {many * shape.width, inner}};
            for (int i = 0; i < 7; ++i) {
                const Matrix &found = nb::cast<const Held &>(parts[6 + i]).matrix;
                check(found.outputs == shapes[i][0] && found.inputs == shapes[i][1],
                      "a matrix does not fit");
                *matrices[i] = &found;
            }
            model.layers.push_back(layer);
        }
        check(int(norm.size()) == shape.width, "the last norm does not fit");
        check(!head || (head->matrix.outputs == shape.vocabulary &&
                        head->matrix.inputs == shape.width),
              "the output matrix does not fit");
        check(int(cosines.shape(1)) == shape.size / 2 && int(sines.shape(1)) == shape.size / 2 &&
                  cosines.shape(0) == sines.shape(0),
              "the rotary factors do not fit");
        model.norm = norm.data();
        model.head = head ? &head->matrix : nullptr;
        model.cosines = cosines.data();
        model.sines = sines.data();
    }

    // `spans` are the rows of each sequence, its length, its nodes that were computed before, and
    // the parts of its cache. `parents` are those of all nodes.
    void compute(Rows states, std::vector<std::tuple<int, int, int, std::vector<Vector>>> spans,
                 Indices positions, Indices parents, std::optional<Rows> logits,
                 std::vector<std::pair<int, Rows>> taps, std::optional<Rows> embedded,
                 int threads) const;
};

void Decoder::compute(Rows states,
                      std::vector<std::tuple<int, int, int, std::vector<Vector>>> spans,
                      Indices positions, Indices parents, std::optional<Rows> logits,
                      std::vector<std::pair<int, Rows>> taps, std::optional<Rows> embedded,
                      int threads) const {
    Forward forward{};
    forward.rows = int(states.shape(0));
    forward.states = states.data();
    forward.positions = positions.data();
    forward.logits = logits ? logits->data() : nullptr;
    check(int(states.shape(1)) == model.shape.width && int(positions.size()) == forward.rows,
          "the rows do not fit");
    check(embedded.has_value() == (!model.layers.empty() && model.layers[0].beside) &&
              (!embedded || (embedded->shape(0) == states.shape(0) &&
                             embedded->shape(1) == states.shape(1))),
          "the embeddings do not fit");
    forward.embedded = embedded ? embedded->data() : nullptr;
    check(!logits || (model.head && int(logits->shape(1)) == model.head->width() &&
                      logits->shape(0) == states.shape(0)),
          "the logits do not fit");
    const size_t keys = size_t(model.shape.shared) * model.shape.size;
    int first = 0;
    size_t node = 0;
    for (const auto &[rows, length, drafted, parts] : spans) {
        check(rows >= 0 && rows <= forward.rows - first && length >= 0 && drafted >= 0 &&
                  size_t(length) + drafted + rows <= parts.size() * PART &&
                  size_t(drafted) + rows <= parents.size() - node,
              "the rows do not fit");
        Span span{first, rows, length, drafted, parents.data() + node, {}};
        for (const Vector &part : parts) {
            check(part.size() == model.layers.size() * 2 * keys * PART, "the cache does not fit");
            span.parts.push_back(part.data());
        }
        for (int row = 0; row < rows; ++row) {
            const int64_t position = positions.data()[first + row];
            check(position >= 0 && position < int64_t(cosines.shape(0)),
                  "a position has no rotary factors");
        }
        for (int at = 0; at < drafted + rows; ++at)
            check(span.parents[at] < at, "a parent stands before its children");
        forward.spans.push_back(std::move(span));
        first += rows;
        node += size_t(drafted) + rows;
    }
    check(first == forward.rows && node == parents.size(), "the rows do not fit");
    forward.taps.resize(model.layers.size() + 1);
    for (const auto &[at, tap] : taps) {
        check(at >= 0 && size_t(at) < forward.taps.size() && tap.shape(0) == states.shape(0) &&
                  tap.shape(1) == states.shape(1),
              "the taps do not fit");
        forward.taps[at] = tap.data();
    }
    nb::gil_scoped_release released;
    level->compute(model, forward, threads);
}

}  // namespace

// Arrays are never converted: results would go to a copy, and pointers to it outlive it.
void bind_quantised(nb::module_ &module) {
    using nb::arg;
    module.attr("GROUP") = GROUP;
    module.attr("FINE") = FINE;
    module.attr("CHANNELS") = CHANNELS;
    module.attr("PART") = PART;
    module.def("levels", &levels);
    module.def("use_level", &use_level, arg("name"));
    module.def("use_openmp", &use_openmp, arg("parallel"));
    nb::class_<Held>(module, "Matrix")
        .def(nb::init<int, int, int, bool, bool, Array<uint8_t, 1>, Array<uint8_t, 1>,
                      std::optional<Vector>>(),
             arg("outputs"), arg("inputs"), arg("bits"), arg("fine"), arg("lows"),
             arg("numbers").noconvert(), arg("scales").noconvert(),
             arg("bias").noconvert().none())
        .def("pack", &Held::pack, arg("weights").noconvert(), arg("first"), arg("threads"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("place", &Held::place, arg("rows").noconvert(), arg("order").noconvert(),
             arg("size"), arg("at"), arg("count"), arg("half"), arg("threads"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("multiply", &Held::multiply, arg("values").noconvert(), arg("out").noconvert(),
             arg("threads"), nb::call_guard<nb::gil_scoped_release>());
    module.def("mix", &mix, arg("gate"), arg("up"), arg("down"), arg("count"),
               arg("states").noconvert(), arg("choices").noconvert(), arg("shares").noconvert(),
               arg("out").noconvert(), arg("threads"), nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Decoder>(module, "Decoder")
        .def(nb::init<std::vector<int>, bool, bool, float, float, nb::list, Vector, const Held *,
                      Rows, Rows, nb::object>(),
             arg("sizes"), arg("normalised"), arg("normed_states"), arg("eps"), arg("scale"),
             arg("layers"), arg("norm").noconvert(), arg("head").none(), arg("cosines").noconvert(),
             arg("sines").noconvert(), arg("held"))
        .def("compute", &Decoder::compute, arg("states").noconvert(), arg("spans").noconvert(),
             arg("positions").noconvert(), arg("parents").noconvert(),
             arg("logits").noconvert().none(), arg("taps").noconvert(),
             arg("embedded").noconvert().none(), arg("threads"));
}
