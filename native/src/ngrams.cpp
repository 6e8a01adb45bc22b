#include "ngrams.hpp"

namespace strata {

Counts::Counts(int longest) : most(longest), mask(63), slots(64) {
    if (longest < 1 || longest > LONGEST) throw std::invalid_argument("keys of 1 to 8 tokens");
}

std::size_t Counts::find(std::uint64_t hash) const {
    std::size_t at = hash & mask;
    while (slots[at].kind != EMPTY && slots[at].hash != hash) at = (at + 1) & mask;
    return at;
}

Counts::Slot &Counts::insert(const Token *end, int size, std::uint64_t hash) {
    if (3 * (known + 1) > 2 * slots.size()) grow();
    ++known;
    keys.push_back(static_cast<Token>(size));
    keys.insert(keys.end(), end - size, end);
    Slot &slot = slots[find(hash)];
    slot.hash = hash;
    return slot;
}

void Counts::grow() {
    std::vector<Slot> old(2 * slots.size());
    old.swap(slots);
    mask = slots.size() - 1;
    for (const Slot &slot : old)
        if (slot.kind != EMPTY) slots[find(slot.hash)] = slot;
}

Followers Counts::told(std::uint32_t kind, std::uint32_t value, Room &room) const {
    if (kind == ONCE) {
        Follower *only = room.take(1);
        *only = {1, value, 0};
        return {1, 1, only, 1, strength(1, 1)};
    }
    return told(owned[value]);
}

std::uint32_t Counts::own(double total, double distinct) {
    Owned made{};
    made.total = total;
    made.distinct = distinct;
    made.room = NEAR;
    owned.push_back(std::move(made));
    return static_cast<std::uint32_t>(owned.size() - 1);
}

// Keep the most frequent next tokens; the others stay counted in the totals.
void Counts::narrow(Owned &of, int size) {
    of.size = size;
    for (int at = 0; at < of.size; ++at) of.ranked()[at].place = at;
    of.next = of.size;
}

// Count a next token, which moves it up among the ranked ones.
void Counts::put(Owned &to, Token token, double count) {
    Follower *ranked = to.ranked();
    int at = 0;
    while (at < to.size && ranked[at].token != token) ++at;
    if (at == to.size) {
        if (to.size == to.room) {
            auto wider = std::make_unique<Follower[]>(2 * to.room);
            std::copy(ranked, ranked + to.size, wider.get());
            far += 2 * to.room - (to.far ? to.room : 0);
            to.far = std::move(wider);
            to.room *= 2;
            ranked = to.ranked();
        }
        ranked[to.size++] = {0, token, to.next++};
    }
    Follower moved = ranked[at];
    moved.count += count;
    for (; at > 0; --at) {
        const Follower &before = ranked[at - 1];
        const bool stays = before.count > moved.count ||
                           (before.count == moved.count && before.place < moved.place);
        if (stays) break;
        ranked[at] = before;
    }
    ranked[at] = moved;
}

template <class Place> void Counts::start(Place &place, Token token, double count) {
    if (count == 1) {
        place.kind = ONCE;
        place.value = token;
        return;
    }
    const std::uint32_t made = own(count, 1);
    put(owned[made], token, count);
    owned[made].strength = static_cast<std::uint8_t>(strength(count, 1));
    place.kind = OWNED;
    place.value = made;
}

// Another occurrence of a key; whether the token had not followed it before.
template <class Place> bool Counts::plus(Place &place, Token token, double count) {
    if (place.kind == ONCE) {
        const Token before = place.value;
        place.value = own(1, 1);
        place.kind = OWNED;
        put(owned[place.value], before, 1);
    }
    return occur(owned[place.value], token, count, WIDEST);
}

// Another occurrence; of more than `widest` next tokens the rarer half is forgotten.
bool Counts::occur(Owned &of, Token token, double count, int widest) {
    const Follower *ranked = of.ranked();
    const bool fresh = std::none_of(ranked, ranked + of.size, [token](const Follower &each) {
        return each.token == token;
    });
    if (fresh) {
        of.distinct += 1;
        if (of.size >= widest) narrow(of, widest / 2);
    }
    put(of, token, count);
    of.total += count;
    of.strength = static_cast<std::uint8_t>(strength(of.total, of.distinct));
    return fresh;
}

// Make room for another key with the same end of `size` tokens, which becomes a key of its own.
void Counts::branch(std::size_t at, int size) {
    const std::uint32_t number = slots[at].value;
    const Leaf leaf = leaves[number];
    slots[at].kind = leaf.kind;
    slots[at].value = leaf.value;
    if (leaf.size == size) return;
    if (leaf.kind == OWNED) {
        const Owned &from = owned[leaf.value];
        const std::uint32_t copied = own(from.total, from.distinct);
        const Owned &old = owned[leaf.value];
        Owned &made = owned[copied];
        made.next = old.next;
        made.size = old.size;
        made.room = old.room;
        made.strength = old.strength;
        if (old.far) {
            made.far = std::make_unique<Follower[]>(old.room);
            far += old.room;
        }
        std::copy(old.ranked(), old.ranked() + old.size, made.ranked());
        slots[at].value = copied;
    }
    const Token *end = leaf.key.data() + leaf.size;
    Slot &moved = insert(end, size + 1, hash(end, size + 1));
    moved.kind = LEAF;
    moved.value = number;
}

bool Counts::add(const Token *end, int size, Token token, double count) {
    ++changes;
    if (!frequent.room) frequent.room = NEAR;
    occur(frequent, token, count, FREQUENT);
    size = std::min(size, most);
    std::uint64_t hash = 0;
    bool fresh = false;
    for (int places = 1; places <= size; ++places) {
        hash = longer(hash, end[-places]);
        std::size_t at = find(hash);
        if (slots[at].kind == EMPTY) {
            Leaf leaf{};
            std::copy(end - size, end, leaf.key.begin());
            leaf.size = size;
            start(leaf, token, count);
            leaves.push_back(leaf);
            Slot &slot = insert(end, places, hash);
            slot.kind = LEAF;
            slot.value = static_cast<std::uint32_t>(leaves.size() - 1);
            return true;
        }
        if (slots[at].kind == LEAF) {
            Leaf &leaf = leaves[slots[at].value];
            if (leaf.size == size && std::equal(end - size, end, leaf.key.begin()))
                return plus(leaf, token, count);
            branch(at, places);
            at = find(hash);
        }
        fresh = plus(slots[at], token, count);
    }
    return fresh;
}

void Counts::read(const std::vector<Token> &tokens, std::size_t first) {
    for (std::size_t at = first; at < tokens.size(); ++at)
        add(tokens.data() + at, static_cast<int>(std::min<std::size_t>(at, most)), tokens[at], 1);
}

Followers Counts::often(Room &) { return told(frequent); }

void Counts::expect(const Suffix &suffix) {
    std::uint64_t hash = 0;
    for (int places = 1; places <= std::min(suffix.size, most); ++places) {
        hash = longer(hash, suffix.back(places));
        prefetch(&slots[hash & mask]);
    }
}

int Counts::matches(const Suffix &suffix, Followers *found, Room &room) {
    const int size = std::min(suffix.size, most);
    std::array<const Slot *, LONGEST> met{};
    std::uint64_t hash = 0;
    int known = 0;
    while (known < size) {
        hash = longer(hash, suffix.back(known + 1));
        const Slot &slot = slots[find(hash)];
        if (slot.kind == EMPTY) break;
        met[known++] = &slot;
        if (slot.kind == OWNED) prefetch(&owned[slot.value]);
        if (slot.kind == LEAF) {
            prefetch(&leaves[slot.value]);
            break;
        }
    }
    for (int at = 0; at < known; ++at) {
        if (met[at]->kind != LEAF) {
            found[at] = told(met[at]->kind, met[at]->value, room);
            continue;
        }
        const Leaf &leaf = leaves[met[at]->value];
        found[at] = told(leaf.kind, leaf.value, room);
        for (; known < std::min(suffix.size, leaf.size); ++known) {
            if (leaf.key[leaf.size - known - 1] != suffix.back(known + 1)) break;
            found[known] = found[at];
        }
        break;
    }
    for (int at = 0; at < known; ++at) prefetch(found[at].first);
    return known;
}

void Counts::clear() {
    std::vector<Slot>(64).swap(slots);
    std::vector<Leaf>().swap(leaves);
    std::vector<Owned>().swap(owned);
    std::vector<Token>().swap(keys);
    frequent = Owned{};
    mask = slots.size() - 1;
    known = far = 0;
    ++changes;
}

std::size_t Counts::bytes() const {
    return slots.capacity() * sizeof(Slot) + leaves.capacity() * sizeof(Leaf) +
           owned.capacity() * sizeof(Owned) + keys.capacity() * sizeof(Token) +
           far * sizeof(Follower);
}

Followers less(const Followers &all, const Followers &taken, Room &room) {
    double gone = 0;
    for (int at = 0; at < taken.size; ++at)
        gone += std::min(taken.first[at].count, all.count(taken.first[at].token));
    const double total = all.total - gone;
    if (total <= 0) return {};
    Follower *left = room.take(all.size);
    int size = 0;
    for (int at = 0; at < all.size; ++at) {
        Follower kept = all.first[at];
        const double minus = std::min(taken.count(kept.token), kept.count);
        if (kept.count <= minus) continue;
        kept.count -= minus;
        left[size++] = kept;
    }
    // As they came at first: `rank` keeps the order of equal ones.
    std::sort(left, left + size,
              [](const Follower &a, const Follower &b) { return a.place < b.place; });
    rank(left, size);
    const double distinct = all.distinct - all.size + size;
    return {total, distinct, left, size, strength(total, distinct)};
}

int Less::matches(const Suffix &suffix, Followers *found, Room &room) {
    Followers own[CLASSES];
    const int known = all.matches(suffix, found, room), shorter = taken.matches(suffix, own, room);
    for (int at = 0; at < std::min(known, shorter); ++at) {
        found[at] = less(found[at], own[at], room);
        if (!found[at].total) return at;
    }
    return known;
}

Followers Less::often(Room &room) {
    const Followers known = all.often(room), own = taken.often(room);
    return known.total && own.total ? less(known, own, room) : known;
}

}  // namespace strata
