#include "copies.hpp"

namespace strata {

std::uint64_t Copies::hash(const Token *end) {
    std::uint64_t found = 0;
    for (int places = 1; places <= LONGEST; ++places)
        found = (found + end[-places] + 1) * 0x9e3779b97f4a7c15ULL;
    return found ^ (found >> 32);
}

void Copies::chain(std::size_t at) {
    Place &last = newest[hash(tokens.data() + at) & mask];
    before[at] = last;
    last = static_cast<Place>(at + 1);
}

void Copies::chain_all(std::size_t room) {
    newest.assign(room, 0);
    mask = newest.size() - 1;
    unbroken = 0;
    for (std::size_t at = 0; at < tokens.size(); ++at) {
        if (tokens[at] == END) {
            unbroken = 0;
            continue;
        }
        if (unbroken++ >= LONGEST) chain(at);
    }
}

void Copies::read(const Token *first, std::size_t size) {
    ++changes;
    for (const Token *next = first; next != first + size; ++next) {
        if (tokens.size() >= newest.size())
            chain_all(std::max<std::size_t>(64, 2 * newest.size()));
        const std::size_t at = tokens.size();
        tokens.push_back(*next);
        before.push_back(0);
        if (*next == END)
            unbroken = 0;
        else if (unbroken++ >= LONGEST)
            chain(at);
    }
}

void Copies::end() { read(&END, 1); }

void Copies::remove(std::size_t from, std::size_t to) {
    ++changes;
    to = std::min(to, tokens.size());
    if (from >= to) return;
    std::fill(tokens.begin() + from, tokens.begin() + to, END);
    chain_all(newest.size());
}

void Copies::clear() {
    std::vector<Token>().swap(tokens);
    std::vector<Place>().swap(before);
    std::vector<Place>().swap(newest);
    mask = unbroken = 0;
    ++changes;
}

int Copies::longest(const Suffix &suffix, Followers &found, Room &room,
                    const Parts &hidden) const {
    if (suffix.size < LONGEST || newest.empty()) return 0;
    const Token *end = suffix.tokens.data() + suffix.size;
    std::array<Follower, EXAMINED> next;
    int best = 0, size = 0, examined = 0;
    for (Place place = newest[hash(end) & mask]; place && examined < EXAMINED;) {
        const std::size_t at = place - 1;
        place = before[at];
        if (place) prefetch(&tokens[place - 1]);
        const int most = static_cast<int>(std::min<std::size_t>(suffix.size, at));
        int length = 0;
        while (length < most && end[-1 - length] == tokens[at - 1 - length]) ++length;
        if (length < LONGEST) continue;
        if (std::any_of(hidden.begin(), hidden.end(), [at](const auto &part) {
                return part.first <= at && at < part.second;
            }))
            continue;
        ++examined;
        if (length < best) continue;
        if (length > best) size = 0;
        best = length;
        const Token token = tokens[at];
        int known = 0;
        while (known < size && next[known].token != token) ++known;
        if (known == size) next[size++] = {0, token, static_cast<std::uint32_t>(known)};
        next[known].count += 1;
    }
    if (!best) return 0;
    double total = 0;
    Follower *kept = room.take(size);
    for (int at = 0; at < size; ++at) {
        kept[at] = next[at];
        total += next[at].count;
    }
    rank(kept, size);
    const double distinct = size;
    found = {total, distinct, kept, size, strength(total, distinct)};
    return best;
}

void Copies::expect(const Suffix &suffix) const {
    if (suffix.size >= LONGEST && !newest.empty())
        prefetch(&newest[hash(suffix.tokens.data() + suffix.size) & mask]);
}

std::size_t Copies::bytes() const {
    return tokens.capacity() * sizeof(Token) +
           (before.capacity() + newest.capacity()) * sizeof(Place);
}

int Copied::matches(const Suffix &suffix, Followers *found, Room &room) {
    const int known = counts.matches(suffix, found, room);
    Followers longest;
    const int length = copies.longest(suffix, longest, room, hidden);
    if (!length) return known;
    int size = LONGEST;
    for (const int least : LONG) size += length >= least;
    for (int at = known; at < size; ++at) found[at] = longest;
    return std::max(known, size);
}

}  // namespace strata
