// The longest earlier match of a text's last tokens: engine/drafting/copies.py, compiled.
//
// Places are chained by a hash of the tokens before them, the newest first. What is hashed alike but
// differs is passed over, so answers are the reference's.
#pragma once
#include <utility>

#include "evidence.hpp"

namespace strata {

class Copies {
  public:
    // Parts of the texts, from a place on and before another.
    using Parts = std::vector<std::pair<std::size_t, std::size_t>>;
    // The most places that are compared.
    static constexpr int EXAMINED = 16;
    // Stands after each text, and in place of what was removed.
    static constexpr Token END = ~Token(0);

    void read(const Token *first, std::size_t size);
    // Close a text, so that no match goes on into the next one.
    void end();
    // Never copy these tokens again.
    void remove(std::size_t from, std::size_t to);
    void clear();
    // The length of the longest match of the suffix, with what followed it; 0 if it is shorter than
    // LONGEST. Places in `hidden` parts do not count.
    int longest(const Suffix &suffix, Followers &found, Room &room, const Parts &hidden) const;
    void expect(const Suffix &suffix) const;
    std::size_t size() const { return tokens.size(); }
    Token token(std::size_t at) const { return tokens[at]; }
    std::size_t bytes() const;
    std::uint64_t version() const { return changes; }

  private:
    using Place = std::uint32_t;  // one more than an index; 0 is none
    static std::uint64_t hash(const Token *end);
    void chain(std::size_t at);
    // Chain all places anew, with room for so many.
    void chain_all(std::size_t room);

    std::size_t mask = 0, unbroken = 0;
    std::uint64_t changes = 0;
    std::vector<Token> tokens;
    std::vector<Place> before;  // the place before each one that is hashed alike
    std::vector<Place> newest;  // by hash
};

// What counts say, and longer matches as further classes of evidence.
class Copied : public Source {
  public:
    Copied(Source &counts, const Copies &copies, Copies::Parts hidden)
        : counts(counts), copies(copies), hidden(std::move(hidden)) {}
    int matches(const Suffix &suffix, Followers *found, Room &room) override;
    Followers often(Room &room) override { return counts.often(room); }
    bool lasting() const override { return counts.lasting(); }
    void expect(const Suffix &suffix) override {
        counts.expect(suffix);
        copies.expect(suffix);
    }
    std::uint64_t version() const override { return counts.version() + copies.version(); }

  private:
    Source &counts;
    const Copies &copies;
    Copies::Parts hidden;
};

}  // namespace strata
