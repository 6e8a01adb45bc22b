// The MLPs of a mixture of experts, as a part of rows.cpp.
//
// The rows of a forward are sorted by their experts, so the weights of an expert are read once for
// all rows that chose it. What a row gets from its experts is added in the order of its choices, so
// it has the same bits whatever the other rows chose.
#pragma once

// SiLU of a gate, times what it lets through.
INLINE void open_gate(const float *gate, const float *up, int many, float *out) {
    for (int i = 0; i < many; i += LANES) {
        const Floats here = load(gate + i), one = Floats{} + 1.0f;
        const auto negative = here < 0.0f;
        const Floats e = exponential(pick(negative, here, -here));
        const Floats share = pick(negative, e, one) / (e + one);
        store(out + i, here * share * load(up + i));
    }
}

// Of each thread that calls.
static thread_local Room sorted_rows;

// What a forward has of a mixture. A place is that of a row and one of its choices, once they are
// sorted; a group has the places of one expert.
struct Experts {
    int rows, count, chosen, width, inner, groups = 0;
    int *choices, *places;  // (rows, chosen)
    float *shares;          // (rows, chosen)
    int *row_at, *group_at;  // by place
    int *experts, *firsts;   // by group: its expert, and its first place
    int *next;               // by expert
    float *logits;           // (rows, count)
    float *gate, *up, *out;  // by place
    char *inputs;

    Experts(int rows, int count, int chosen, int width, int inner)
        : rows(rows), count(count), chosen(chosen), width(width), inner(inner) {
        const size_t all = size_t(rows) * chosen;
        const size_t numbers = 5 * all + 3 * size_t(count) + 1 + size_t(rows) * count +
                               all * (2 * size_t(inner) + width);
        const int widest = padded(width > inner ? width : inner);
        char *at = sorted_rows.of(sizeof(float) * numbers + Inputs::bytes(int(all), widest));
        const auto take = [&](auto *&array, size_t size) {
            array = decltype(array + 0)(at);
            at += size * sizeof *array;
        };
        take(choices, all), take(places, all), take(shares, all);
        take(row_at, all), take(group_at, all);
        take(experts, count), take(firsts, count + 1), take(next, count);
        take(logits, size_t(rows) * count);
        take(gate, all * inner), take(up, all * inner), take(out, all * width);
        inputs = at;
    }

    int all() const { return rows * chosen; }
    // The inputs of a group to its part of a matrix, and to others that read the same.
    Inputs of(int group, const Matrix &matrix) const {
        const int first = firsts[group], many = firsts[group + 1] - first;
        const int numbers = padded(matrix.inputs);
        return Inputs::at(inputs + Inputs::bytes(first, numbers), many, numbers,
                          many >= TILE && in_tiles(many, matrix));
    }
};

// Choose the experts of a row by its logits, which are lost.
INLINE void choose(const Experts &all, int row, bool normalised) {
    float *logits = all.logits + size_t(row) * all.count;
    float peak = logits[0], mass = 0.0f, kept = 0.0f;
    for (int e = 1; e < all.count; ++e) peak = logits[e] > peak ? logits[e] : peak;
    for (int e = 0; e < all.count; ++e)
        mass += logits[e] = passes::exponential<float, uint32_t>(logits[e] - peak);
    int *choices = all.choices + size_t(row) * all.chosen;
    float *shares = all.shares + size_t(row) * all.chosen;
    for (int k = 0; k < all.chosen; ++k) {
        int best = 0;
        for (int e = 1; e < all.count; ++e)
            if (logits[e] > logits[best]) best = e;
        choices[k] = best, shares[k] = logits[best], kept += logits[best];
        logits[best] = -1.0f;
    }
    for (int k = 0; k < all.chosen; ++k) shares[k] /= normalised ? kept : mass;
}

INLINE void sort_rows(Experts &all) {
    for (int e = 0; e < all.count; ++e) all.next[e] = 0;
    for (int i = 0; i < all.all(); ++i) ++all.next[all.choices[i]];
    int place = all.groups = 0;
    for (int e = 0; e < all.count; ++e) {
        const int first = place, many = all.next[e];
        all.next[e] = first;
        if (!many) continue;
        for (; place < first + many; ++place) all.group_at[place] = all.groups;
        all.experts[all.groups] = e;
        all.firsts[all.groups++] = first;
    }
    all.firsts[all.groups] = place;
    for (int i = 0; i < all.all(); ++i) {
        all.places[i] = all.next[all.choices[i]]++;
        all.row_at[all.places[i]] = i / all.chosen;
    }
}

// A product of all groups with their experts' parts of some matrices, which have one shape.
INLINE void multiply_groups(const Team &team, const Experts &all, const Product *products,
                            int count) {
    const Matrix &first = *products->matrix;
    const int blocks = first.blocks() / all.count;
    const Tiles tiles(in_tiles(all.all(), first));
    team.each(all.groups * count * blocks, [&](int at) {
        const int group = at / blocks / count;
        const Product &product = products[at / blocks % count];
        Matrix part = *product.matrix;
        part.outputs /= all.count;
        part.numbers += size_t(all.experts[group]) * blocks * part.block_bytes();
        part.scales += size_t(all.experts[group]) * blocks * part.scale_bytes();
        multiply_block(part, all.of(group, first), at % blocks,
                       product.out + size_t(all.firsts[group]) * part.width(), product.onto);
    });
}

// What the chosen experts give for some rows. `gate`, `up` and `down` have the outputs of all
// experts behind each other.
INLINE void mix_experts(const Team &team, Experts &all, const Layer &layer, const Inputs &inputs,
                        float *out, bool onto) {
    team.each(1, [&](int) { sort_rows(all); });
    team.each(all.all(), [&](int place) {
        const int group = all.group_at[place], row = place - all.firsts[group];
        all.of(group, *layer.gate).copy(row, inputs, all.row_at[place]);
    });
    const Product two[] = {{layer.gate, all.gate, false}, {layer.up, all.up, false}};
    multiply_groups(team, all, two, 2);
    const int parts = padded(all.inner) / GROUP;
    team.each(all.all() * parts, [&](int at) {
        const int place = at / parts, group = all.group_at[place], first = at % parts * GROUP;
        const size_t from = size_t(place) * all.inner + first;
        const int left = all.inner - first;
        float values[GROUP];
        open_gate(all.gate + from, all.up + from, left < GROUP ? left : GROUP, values);
        const Inputs to = all.of(group, *layer.down);
        to.take(place - all.firsts[group], at % parts, values, all.inner);
    });
    const Product down{layer.down, all.out, false};
    multiply_groups(team, all, &down, 1);
    team.each(all.rows, [&](int row) {
        const int *places = all.places + size_t(row) * all.chosen;
        const float *shares = all.shares + size_t(row) * all.chosen;
        float *to = out + size_t(row) * all.width;
        for (int i = 0; i < all.width; i += LANES) {
            Floats sum = {};
            for (int k = 0; k < all.chosen; ++k)
                sum += load(all.out + size_t(places[k]) * all.width + i) * shares[k];
            store(to + i, onto ? load(to + i) + sum : sum);
        }
    });
}

struct Mixing {
    const Layer &layer;
    const float *states;
    Experts experts;
    Inputs inputs;
    float *out;
    Meeting meeting;
};

void mix(const Layer &layer, int count, const float *states, int rows, const int64_t *choices,
         const float *shares, int chosen, float *out, int threads) {
    const int width = layer.gate->inputs;
    char *bytes = room.of(Inputs::most_bytes(rows, padded(width)));
    const bool tiled = in_tiles(rows, *layer.gate);
    Mixing all{layer, states, Experts(rows, count, chosen, width, layer.down->inputs),
               Inputs::at(bytes, rows, padded(width), tiled), out, Meeting(threads)};
    for (int i = 0; i < rows * chosen; ++i) {
        all.experts.choices[i] = int(choices[i]);
        all.experts.shares[i] = shares[i];
    }
    in_parallel(threads, [](void *work) {
        Mixing &all = *static_cast<Mixing *>(work);
        const Team team(all.meeting);
        take_rows(team, all.inputs, all.states, all.layer.gate->inputs);
        mix_experts(team, all.experts, all.layer, all.inputs, all.out, false);
    }, &all);
}
