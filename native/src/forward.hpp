// A forward of a Llama-like model, as a part of rows.cpp.
//
// Attention adds up in the order of the text. A row's scores are put in that order before anything
// is added, so a token has the same bits whether the tokens before it are cached or drafted, and
// whatever other rows the tree has. Rows of several sequences share everything but that: each sees
// the cache of its own sequence, so it has the same bits in any company.
#pragma once

// Rows of a span for which one thread computes the attention of one head of keys.
constexpr int TOGETHER = 4;

struct Work {
    const Model &model;
    const Forward &forward;
    float *normed, *query, *key, *value, *mixed, *gate, *up;
    char *inputs;
    Experts *experts;
    Meeting meeting;

    int rows() const { return forward.rows; }
    const Shape &shape() const { return model.shape; }
    // The inputs to a matrix, and to others that read the same.
    Inputs of(const Matrix *matrix) const {
        return Inputs::at(inputs, rows(), padded(matrix->inputs), in_tiles(rows(), *matrix));
    }
};

// The cache of a span, for one head of keys in one layer.
struct Cached {
    const Span &span;
    size_t keys_at, values_at;
    int size;

    Cached(const Work &work, const Span &span, int layer, int head)
        : span(span), size(work.shape().size) {
        const size_t room = size_t(PART) * size, shared = work.shape().shared;
        keys_at = (layer * 2 * shared + head) * room;
        values_at = keys_at + shared * room;
    }
    float *keys(int slot) const {
        return span.parts[slot / PART] + keys_at + size_t(slot % PART / BLOCK) * BLOCK * size;
    }
    float *values(int slot) const {
        return span.parts[slot / PART] + values_at + size_t(slot % PART) * size;
    }
};

INLINE void normalise(const float *values, const float *weights, int width, float eps, float *out) {
    Floats square = {};
    for (int i = 0; i < width; i += LANES) {
        const Floats here = load(values + i);
        square += here * here;
    }
    const float by = 1.0f / __builtin_sqrtf(added(square) / float(width) + eps);
    for (int i = 0; i < width; i += LANES) store(out + i, load(values + i) * by * load(weights + i));
}

// The norms of all rows, rounded for the matrix that reads them, if there is one.
INLINE void take_norms(const Team &team, const Work &work, const float *weights,
                       const Matrix *to) {
    const int width = work.shape().width;
    const Inputs inputs = to ? work.of(to) : Inputs{};
    team.each(work.rows(), [&](int row) {
        float *out = work.normed + size_t(row) * width;
        normalise(work.forward.states + size_t(row) * width, weights, width, work.shape().eps, out);
        for (int g = 0; to && g * GROUP < width; ++g)
            inputs.take(row, g, out + g * GROUP, width);
    });
}

// The embeddings and the states of all rows, normed and side by side.
INLINE void take_pairs(const Team &team, const Work &work, const Layer &layer) {
    const int width = work.shape().width, both = 2 * width;
    const Inputs inputs = work.of(layer.query);
    team.each(work.rows(), [&](int row) {
        float *out = work.normed + size_t(row) * both;
        float *states = work.forward.states + size_t(row) * width;
        const float *embedded = work.forward.embedded + size_t(row) * width;
        normalise(embedded, layer.before, width, work.shape().eps, out);
        normalise(states, layer.beside, width, work.shape().eps, out + width);
        if (work.shape().normed_states)
            __builtin_memcpy(states, out + width, size_t(width) * sizeof(float));
        for (int g = 0; g * GROUP < both; ++g) inputs.take(row, g, out + g * GROUP, both);
    });
}

// Round rows of inputs to a matrix, which `fill(row, first, many, out)` computes a group at a time.
template <class Fill>
INLINE void take_groups(const Team &team, const Work &work, const Matrix *to, Fill fill) {
    const Inputs inputs = work.of(to);
    const int count = to->inputs, groups = padded(count) / GROUP;
    team.each(work.rows() * groups, [&](int at) {
        float values[GROUP];
        const int first = at % groups * GROUP, left = count - first;
        fill(at / groups, first, left < GROUP ? left : GROUP, values);
        inputs.take(at / groups, at % groups, values, count);
    });
}

INLINE void rotate(float *head, const float *cosines, const float *sines, int size, float scale) {
    for (int i = 0; i < size / 2; i += LANES) {
        const Floats left = load(head + i), right = load(head + size / 2 + i);
        const Floats c = load(cosines + i), s = load(sines + i);
        store(head + i, (left * c - right * s) * scale);
        store(head + size / 2 + i, (right * c + left * s) * scale);
    }
}

// Place the keys and values of a span's rows in its cache, and turn the queries.
INLINE void place(const Work &work, int number, int head, const Span &span) {
    const Shape &shape = work.shape();
    const Layer &layer = work.model.layers[number];
    const Cached cached(work, span, number, head);
    const int size = shape.size, group = shape.heads / shape.shared;
    for (int row = span.first; row < span.first + span.rows; ++row) {
        const size_t at = size_t(work.forward.positions[row]) * (size / 2);
        const float *cosines = work.model.cosines + at, *sines = work.model.sines + at;
        for (int g = 0; g < group; ++g) {
            float *query = work.query + (size_t(row) * shape.heads + head * group + g) * size;
            if (layer.query_norm) normalise(query, layer.query_norm, size, shape.eps, query);
            rotate(query, cosines, sines, size, shape.scale);
        }
        float *key = work.key + (size_t(row) * shape.shared + head) * size;
        if (layer.key_norm) normalise(key, layer.key_norm, size, shape.eps, key);
        rotate(key, cosines, sines, size, 1.0f);
        const int slot = span.length + span.drafted + row - span.first;
        float *keys = cached.keys(slot) + slot % BLOCK;
        for (int d = 0; d < size; ++d) keys[d * BLOCK] = key[d];
        __builtin_memcpy(cached.values(slot),
                         work.value + (size_t(row) * shape.shared + head) * size,
                         size_t(size) * sizeof(float));
    }
}

// Scores of Q queries, which are neighbours, with B blocks of keys.
template <int Q, int B>
INLINE void score(const float *queries, const float *const *keys, int size, float *scores,
                  size_t stride) {
    Floats sums[Q][B] = {};
    for (int d = 0; d < size; ++d)
        for (int b = 0; b < B; ++b) {
            const Floats here = load(keys[b] + d * BLOCK);
            for (int q = 0; q < Q; ++q) sums[q][b] += here * queries[q * size + d];
        }
    for (int q = 0; q < Q; ++q)
        for (int b = 0; b < B; ++b) store(scores + q * stride + b * BLOCK, sums[q][b]);
}

template <int Q>
INLINE void scores_of(const Cached &cached, const float *queries, float *scores, size_t stride) {
    const int count = int(stride);
    int slot = 0;
    for (; slot + 2 * BLOCK <= count; slot += 2 * BLOCK) {
        const float *keys[2] = {cached.keys(slot), cached.keys(slot + BLOCK)};
        score<Q, 2>(queries, keys, cached.size, scores + slot, stride);
    }
    for (; slot < count; slot += BLOCK) {
        const float *keys[1] = {cached.keys(slot)};
        score<Q, 1>(queries, keys, cached.size, scores + slot, stride);
    }
}

// Turn the first `count` scores into weights, whose sum is returned.
INLINE float weighed(float *scores, int count) {
    const int padded = (count + LANES - 1) / LANES * LANES;
    for (int i = count; i < padded; ++i) scores[i] = passes::LOWEST;
    Floats most = load(scores), mass = {};
    for (int i = LANES; i < padded; i += LANES) {
        const Floats here = load(scores + i);
        most = pick(here > most, here, most);
    }
    const float peak = largest<float>(most);
    for (int i = 0; i < padded; i += LANES) store(scores + i, exponential(load(scores + i) - peak));
    for (int i = count; i < padded; ++i) scores[i] = 0.0f;
    for (int i = 0; i < padded; i += LANES) mass += load(scores + i);
    return added(mass);
}

// The values of a row's text, weighed for Q heads, which are neighbours.
template <int Q, int D>
INLINE void mix(const Cached &cached, const int *path, int drafted, const float *weights,
                size_t stride, const float *masses, float *out) {
    const int length = cached.span.length;
    Floats sums[Q][D] = {};
    for (int p = 0; p < length + drafted; ++p) {
        const int slot = p < length ? p : path[p - length];
        const float *values = cached.values(slot);
        for (int d = 0; d < D; ++d) {
            const Floats here = load(values + d * LANES);
            for (int q = 0; q < Q; ++q) sums[q][d] += here * weights[q * stride + p];
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int d = 0; d < D; ++d)
            store(out + (q * D + d) * LANES, sums[q][d] * (1.0f / masses[q]));
}

template <int D>
INLINE void mixed(const Cached &cached, int group, const int *path, int drafted,
                  const float *weights, size_t stride, const float *masses, float *out) {
    constexpr int MANY = D <= 4 ? 4 : 2;
    int g = 0;
    for (; g + MANY <= group; g += MANY)
        mix<MANY, D>(cached, path, drafted, weights + g * stride, stride, masses + g,
                     out + g * D * LANES);
    for (; g < group; ++g)
        mix<1, D>(cached, path, drafted, weights + g * stride, stride, masses + g,
                  out + g * D * LANES);
}

INLINE int units_of(const Span &span) { return (span.rows + TOGETHER - 1) / TOGETHER; }

// Of each thread.
static thread_local Room own;

// The attention of some rows of a span, from `first` on, to one head of keys.
INLINE void attend(const Work &work, int number, int head, const Span &span, int first) {
    const Shape &shape = work.shape();
    const Cached cached(work, span, number, head);
    const int64_t *parents = span.parents;
    const int rows = span.rows, nodes = span.drafted + rows, length = span.length;
    const int size = shape.size;
    const int group = shape.heads / shape.shared;
    const size_t stride = size_t(length + nodes + BLOCK - 1) / BLOCK * BLOCK;
    char *bytes = own.of(sizeof(float) * (group * stride + group) + sizeof(int) * nodes);
    float *scores = (float *)bytes, *masses = scores + group * stride;
    int *path = (int *)(masses + group);
    for (int row = first; row < rows && row < first + TOGETHER; ++row) {
        const size_t place = size_t(span.first + row) * shape.heads + head * group;
        const float *queries = work.query + place * size;
        int g = 0;
        for (; g + 4 <= group; g += 4)
            scores_of<4>(cached, queries + g * size, scores + g * stride, stride);
        for (; g < group; ++g)
            scores_of<1>(cached, queries + g * size, scores + g * stride, stride);
        int drafted = 0;
        const int node = span.drafted + row;
        for (int64_t at = node; at >= 0; at = parents[at]) ++drafted;
        int left = drafted;
        for (int64_t at = node; at >= 0; at = parents[at]) path[--left] = length + int(at);
        for (g = 0; g < group; ++g) {
            float *own = scores + g * stride;
            for (int i = 0; i < drafted; ++i) own[length + i] = own[path[i]];
            masses[g] = weighed(own, length + drafted);
        }
        float *out = work.mixed + place * size;
        switch (size) {
        case 32: mixed<2>(cached, group, path, drafted, scores, stride, masses, out); break;
        case 64: mixed<4>(cached, group, path, drafted, scores, stride, masses, out); break;
        case 128: mixed<8>(cached, group, path, drafted, scores, stride, masses, out); break;
        default: mixed<16>(cached, group, path, drafted, scores, stride, masses, out);
        }
    }
}

// Choose the experts of all rows by their normed states.
INLINE void route(const Team &team, const Work &work, const float *router) {
    const Experts &all = *work.experts;
    team.each(all.count, [&](int expert) {
        const float *weights = router + size_t(expert) * all.width;
        for (int row = 0; row < all.rows; ++row) {
            const float *states = work.normed + size_t(row) * all.width;
            Floats sum = {};
            for (int i = 0; i < all.width; i += LANES) sum += load(states + i) * load(weights + i);
            all.logits[size_t(row) * all.count + expert] = added(sum);
        }
    });
    team.each(all.rows, [&](int row) { choose(all, row, work.shape().normalised); });
}

INLINE void compute_layer(const Team &team, const Work &work, int number) {
    const Layer &layer = work.model.layers[number];
    const Shape &shape = work.shape();
    float *states = work.forward.states;
    const int attended = shape.heads * shape.size;
    if (layer.beside)
        take_pairs(team, work, layer);
    else
        take_norms(team, work, layer.before, layer.query);
    const Product three[] = {{layer.query, work.query, false},
                             {layer.key, work.key, false},
                             {layer.value, work.value, false}};
    multiplied(team, work.of(layer.query), three, 3);
    const std::vector<Span> &spans = work.forward.spans;
    team.each(shape.shared * int(spans.size()), [&](int at) {
        place(work, number, at % shape.shared, spans[at / shape.shared]);
    });
    int units = 0;
    for (const Span &span : spans) units += units_of(span);
    team.each(shape.shared * units, [&](int at) {
        const Span *span = spans.data();
        int unit = at / shape.shared;
        for (; unit >= units_of(*span); ++span) unit -= units_of(*span);
        attend(work, number, at % shape.shared, *span, unit * TOGETHER);
    });
    take_groups(team, work, layer.output, [&](int row, int first, int many, float *out) {
        const float *from = work.mixed + size_t(row) * attended + first;
        __builtin_memcpy(out, from, many * sizeof(float));
    });
    const Product back{layer.output, states, true};
    multiplied(team, work.of(layer.output), &back, 1);
    take_norms(team, work, layer.between, layer.gate);
    if (layer.router) {
        route(team, work, layer.router);
        mix_experts(team, *work.experts, layer, work.of(layer.gate), states, true);
        return;
    }
    const Product two[] = {{layer.gate, work.gate, false}, {layer.up, work.up, false}};
    multiplied(team, work.of(layer.gate), two, 2);
    take_groups(team, work, layer.down, [&](int row, int first, int many, float *out) {
        const size_t at = size_t(row) * shape.inner + first;
        open_gate(work.gate + at, work.up + at, many, out);
    });
    const Product down{layer.down, states, true};
    multiplied(team, work.of(layer.down), &down, 1);
}

INLINE void keep(const Team &team, const Work &work, size_t tap, const float *from) {
    float *to = work.forward.taps[tap];
    const int width = work.shape().width;
    if (to)
        team.each(work.rows(), [&](int row) {
            __builtin_memcpy(to + size_t(row) * width, from + size_t(row) * width,
                             size_t(width) * sizeof(float));
        });
}

void compute_all(const Team &team, const Work &work) {
    const int count = int(work.model.layers.size());
    for (int number = 0; number < count; ++number) {
        compute_layer(team, work, number);
        keep(team, work, number, work.forward.states);
    }
    if (!work.forward.logits && !work.forward.taps[count]) return;
    const Product logits{work.model.head, work.forward.logits, false};
    take_norms(team, work, work.model.norm, logits.out ? logits.matrix : nullptr);
    keep(team, work, count, work.normed);
    if (logits.out) multiplied(team, work.of(logits.matrix), &logits, 1);
}

void compute(const Model &model, Forward &forward, int threads) {
    const Shape &shape = model.shape;
    const int attended = shape.heads * shape.size, keys = shape.shared * shape.size;
    const int read = forward.embedded ? 2 * shape.width : shape.width;
    const int widths[] = {read, attended, keys, keys, attended, shape.inner, shape.inner};
    int widest = read > attended ? read : attended;
    widest = widest > shape.inner ? widest : shape.inner;
    size_t numbers = 0;
    for (int width : widths) numbers += size_t(width) * forward.rows;
    const size_t inputs = Inputs::most_bytes(forward.rows, padded(widest));
    char *bytes = room.of(sizeof(float) * numbers + inputs);
    float *at[7] = {(float *)bytes};
    for (int i = 1; i < 7; ++i) at[i] = at[i - 1] + size_t(widths[i - 1]) * forward.rows;
    Experts experts(forward.rows, shape.experts, shape.chosen, shape.width, shape.small);
    Work work{model, forward, at[0], at[1], at[2], at[3], at[4], at[5], at[6],
              bytes + sizeof(float) * numbers, &experts, Meeting(threads)};
    in_parallel(threads, [](void *given) {
        const Work &work = *static_cast<Work *>(given);
        compute_all(Team(static_cast<Work *>(given)->meeting), work);
    }, &work);
}
