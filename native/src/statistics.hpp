// The statistics of large texts in one piece of memory: storage/statistics.py reads the file.
//
// An unknown key costs one line of the processor's cache, a known one three. Every entry is checked
// by the rules of `unpack` there when it is read; what breaks them is left out, as if it were not
// in the file. A table that would take too much memory becomes a filter, which says of most unknown
// keys that they are unknown; known ones are then looked up in the file.
#pragma once
#include <atomic>
#include <string_view>

#include "evidence.hpp"

namespace strata {

// What the file's numbers stand for, and what is possible in it.
struct Scales {
    std::vector<double> counts, shares;  // what a byte stands for
    double rounded;                      // by how much a number may exceed what it was made from
    double tokens;                       // the tokens of the texts
    std::uint64_t vocabulary;
    int bits;     // of a token in a packed key
    int widest;   // next tokens of a key
    bool wide;    // whether a token takes four bytes, not two
};

class Table {
  public:
    Table(Scales scales, std::size_t limit, std::size_t expected);

    // Take over entries, each "KEY HEX," in ascending order of the keys.
    void read(std::string_view text);
    // No more entries will come: from now on the table answers.
    void seal();
    bool ready() const { return sealed.load(std::memory_order_acquire); }
    // Whether only the filter is left.
    bool too_large() const { return !filter.empty(); }
    // Whether the packed key may be in the file; without a filter, whether it is.
    bool may_hold(std::uint64_t packed) const;
    // What followed the last 1, 2, 3 tokens. Only of a table that is ready and not too large.
    int matches(const Suffix &suffix, int longest, Followers *found, Room &room) const;
    void expect(const Suffix &suffix, int longest) const;
    // The last `size` tokens as one number, 0 where they do not fit one.
    std::uint64_t packed(const Suffix &suffix, int size) const;
    // What a key's bytes say, as they stand in the file; nothing (size 0) for a damaged one.
    Followers unpacked(const std::uint8_t *bytes, std::size_t size, Room &room) const;
    std::size_t bytes() const { return taken.load(std::memory_order_relaxed); }
    std::size_t size() const { return count; }

  private:
    static constexpr std::size_t LINE = 8;  // keys in a line of the cache
    void weigh();
    void take(std::uint64_t key, const std::uint8_t *bytes, std::size_t size);
    void note(std::uint64_t key);
    void give_up();
    std::size_t line(std::uint64_t key) const { return (mixed(key) & mask) * LINE; }
    std::size_t find(std::uint64_t key) const;
    Followers decoded(const std::uint8_t *entry, Room &room) const;

    Scales scales;
    std::size_t limit, expected, count = 0, mask = 0;
    std::vector<std::pair<std::uint64_t, std::uint32_t>> coming;
    std::unique_ptr<std::uint64_t[]> memory;
    std::uint64_t *keys = nullptr;  // lines of eight; 0 is an empty place
    std::vector<std::uint32_t> places;
    std::vector<std::uint8_t> entries;  // number of next tokens, then as in the file
    std::vector<std::uint64_t> filter;
    Room scratch;
    std::atomic<std::size_t> taken{0};
    std::atomic<bool> sealed{false};
};

}  // namespace strata
