// Counts of what followed each key of up to `longest` tokens: engine/drafting/ngrams.py, compiled.
//
// A key is found by a hash of its tokens alone, so all suffixes of a text are asked for at once,
// whatever the processor has in its caches. As there, a key that is the only one with its end is a
// leaf, kept by the shortest such end. Two keys of one 64-bit hash would share their counts, which
// can only cost a draft.
#pragma once
#include <stdexcept>

#include "evidence.hpp"

namespace strata {

class Counts : public Source {
  public:
    // The most tokens that are kept as often counted: the rarer half goes when there are more.
    static constexpr int FREQUENT = 256;
    explicit Counts(int longest);

    // Count `token` after the `size` tokens before `end`, and after each of their suffixes; whether
    // the two were new.
    bool add(const Token *end, int size, Token token, double count);
    // Count each of the tokens from `first` on after those before it.
    void read(const std::vector<Token> &tokens, std::size_t first);
    int matches(const Suffix &suffix, Followers *found, Room &room) override;
    Followers often(Room &room) override;
    void expect(const Suffix &suffix) override;
    std::uint64_t version() const override { return changes; }
    // Forget everything.
    void clear();
    std::size_t bytes() const;

    // Every key in the order of its first occurrence, a leaf's as the whole key.
    template <class Visit> void each(Visit visit) const {
        Room room;
        for (std::size_t at = 0; at < keys.size(); at += 1 + keys[at]) {
            const int size = static_cast<int>(keys[at]);
            const Token *end = keys.data() + at + 1 + size;
            const Slot &slot = slots[find(hash(end, size))];
            if (slot.kind == LEAF) {
                const Leaf &leaf = leaves[slot.value];
                visit(leaf.key.data(), leaf.size, told(leaf.kind, leaf.value, room));
            } else {
                visit(end - size, size, told(slot.kind, slot.value, room));
            }
        }
    }

  private:
    // What is known of a key: nothing, a leaf, one next token that was seen once, or counts.
    enum Kind : std::uint32_t { EMPTY, LEAF, ONCE, OWNED };
    struct Slot {
        std::uint64_t hash = 0;
        std::uint32_t kind = EMPTY, value = 0;
    };
    struct Leaf {
        std::array<Token, LONGEST> key;
        int size;
        std::uint32_t kind = EMPTY, value = 0;
    };
    // Followers of a key's own, ranked. A few lie beside the figures, more of them elsewhere.
    static constexpr int NEAR = 2;
    struct alignas(64) Owned {
        double total, distinct;
        std::unique_ptr<Follower[]> far;
        std::uint32_t next;
        std::uint16_t size, room;
        std::uint8_t strength;
        Follower near[NEAR];
        const Follower *ranked() const { return far ? far.get() : near; }
        Follower *ranked() { return far ? far.get() : near; }
    };
    static std::uint64_t longer(std::uint64_t hash, Token token) {
        return mixed(hash + 0x9e3779b97f4a7c15ULL + token);
    }
    static std::uint64_t hash(const Token *end, int size) {
        std::uint64_t found = 0;
        for (int places = 1; places <= size; ++places) found = longer(found, end[-places]);
        return found;
    }
    std::size_t find(std::uint64_t hash) const;
    Slot &insert(const Token *end, int size, std::uint64_t hash);
    void grow();
    Followers told(std::uint32_t kind, std::uint32_t value, Room &room) const;
    template <class Place> void start(Place &place, Token token, double count);
    template <class Place> bool plus(Place &place, Token token, double count);
    std::uint32_t own(double total, double distinct);
    bool occur(Owned &of, Token token, double count, int widest);
    void put(Owned &to, Token token, double count);
    static void narrow(Owned &of, int size);
    static Followers told(const Owned &of) {
        return {of.total, of.distinct, of.ranked(), of.size, of.strength};
    }
    void branch(std::size_t at, int size);

    int most;
    std::size_t mask, known = 0;
    std::uint64_t changes = 0;
    std::vector<Slot> slots;
    std::vector<Leaf> leaves;
    std::vector<Owned> owned;
    Owned frequent{};  // whatever the key
    std::vector<Token> keys;  // each key as its length and its tokens, in the order of coming
    std::size_t far = 0;  // followers that lie elsewhere
};

// Followers without the occurrences in others.
Followers less(const Followers &all, const Followers &taken, Room &room);

// Counts without those of one answer, which they hold: engine/drafting/tiers.py, Unlearned.
class Less : public Source {
  public:
    Less(Source &all, Source &taken) : all(all), taken(taken) {}
    int matches(const Suffix &suffix, Followers *found, Room &room) override;
    Followers often(Room &room) override;
    bool lasting() const override { return all.lasting() && taken.lasting(); }
    void expect(const Suffix &suffix) override { all.expect(suffix); }
    std::uint64_t version() const override { return all.version() + taken.version(); }

  private:
    Source &all, &taken;
};

}  // namespace strata
