// What followed a key, as every database tells it: engine/types.py says what the numbers mean.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace strata {

using Token = std::uint32_t;

// The longest key of counts.
constexpr int LONGEST = 8;
// From so many tokens on, longer matches are further classes of evidence.
constexpr int LONG[] = {16, 32, 64};
// The match lengths of evidence, and how many of the last tokens databases are asked with.
constexpr int CLASSES = LONGEST + 3, WINDOW = 64;
// The most next tokens that are kept for a key.
constexpr int WIDEST = 32;

// The fewest tokens that match in evidence of a match length.
inline int least_length(int match_length) {
    return match_length <= LONGEST ? match_length : LONG[match_length - LONGEST - 1];
}

// A next token and its count. `place` is its place in the order of first occurrence.
struct Follower {
    double count;
    Token token;
    std::uint32_t place;
};

// A class of evidence by its occurrences and by distinct next tokens per occurrence.
inline int strength(double total, double distinct) {
    constexpr double totals[] = {1, 2, 4, 9, 30, 100};
    constexpr double diversities[] = {0.1, 0.3, 0.6, 0.95};
    int row = 0, column = 0;
    while (row < 6 && totals[row] < total) ++row;
    const double share = distinct / total;
    while (column < 4 && diversities[column] < share) ++column;
    return row * 5 + column;
}

// One database's answer for one match length: the next tokens, the most frequent first. A total of
// 0 is no answer.
struct Followers {
    double total = 0, distinct = 0;
    const Follower *first = nullptr;
    int size = 0;
    int strength = 0;

    double count(Token token) const {
        for (int at = 0; at < size; ++at)
            if (first[at].token == token) return first[at].count;
        return 0;
    }
};

// The last tokens of a text, the newest last.
struct Suffix {
    std::array<Token, WINDOW> tokens{};
    int size = 0;

    void push(Token token) {
        if (size == WINDOW) {
            std::copy(tokens.begin() + 1, tokens.end(), tokens.begin());
            tokens[WINDOW - 1] = token;
        } else {
            tokens[size++] = token;
        }
    }
    // The token that many places before the end, from 1.
    Token back(int places) const { return tokens[size - places]; }
    bool operator==(const Suffix &other) const {
        // Suffixes of one tree differ at their ends.
        return size == other.size && (!size || back(1) == other.back(1)) &&
               std::equal(tokens.begin(), tokens.begin() + size, other.tokens.begin());
    }
};

// Room for answers that are made for one step. What was handed out stays where it is until `clear`.
class Room {
  public:
    static constexpr int BLOCK = 1024;  // the most that can be taken at once
    Room() = default;
    Room(const Room &) = delete;
    Follower *take(int size) {
        if (blocks.empty() || used + size > BLOCK) {
            if (next == blocks.size()) blocks.push_back(std::make_unique<Follower[]>(BLOCK));
            ++next;
            used = 0;
        }
        Follower *taken = blocks[next - 1].get() + used;
        used += size;
        return taken;
    }
    void clear() {
        next = blocks.empty() ? 0 : 1;
        used = 0;
    }

  private:
    std::vector<std::unique_ptr<Follower[]>> blocks;
    std::size_t next = 0;
    int used = 0;
};

// A database that drafting asks. What it answers holds until it learns, or until `room` is cleared.
class Source {
  public:
    Source() = default;
    Source(const Source &) = delete;
    virtual ~Source() = default;
    // What followed the last 1, 2, ... tokens of the suffix, as far as known; how many those are.
    virtual int matches(const Suffix &suffix, Followers *found, Room &room) = 0;
    // What is often said, whatever came before.
    virtual Followers often(Room &) { return {}; }
    // Whether that changes with the version alone.
    virtual bool lasting() const { return true; }
    // The suffix is to be asked for soon: have the processor fetch what that takes.
    virtual void expect(const Suffix &) {}
    // Another number after everything that it learns.
    virtual std::uint64_t version() const { return 0; }
};

// Sort by count, the most frequent first; equal ones keep their order.
inline void rank(Follower *first, int size) {
    for (int at = 1; at < size; ++at) {
        const Follower moved = first[at];
        int to = at;
        for (; to > 0 && first[to - 1].count < moved.count; --to) first[to] = first[to - 1];
        first[to] = moved;
    }
}

inline std::uint64_t mixed(std::uint64_t bits) {
    bits ^= bits >> 30;
    bits *= 0xbf58476d1ce4e5b9ULL;
    bits ^= bits >> 27;
    bits *= 0x94d049bb133111ebULL;
    return bits ^ (bits >> 31);
}

#if defined(__GNUC__) || defined(__clang__)
inline void prefetch(const void *where) { __builtin_prefetch(where); }
#else
inline void prefetch(const void *) {}
#endif

}  // namespace strata
