#include "statistics.hpp"

#include <charconv>

namespace strata {

namespace {
constexpr std::size_t HEAD = 2;
constexpr std::size_t FILTER_BITS = 10;  // per key: one unknown key of a hundred passes
constexpr int PROBES = 6;

int digit(char letter) {
    if (letter >= '0' && letter <= '9') return letter - '0';
    if (letter >= 'A' && letter <= 'F') return letter - 'A' + 10;
    return -1;
}
}  // namespace

Table::Table(Scales scales, std::size_t limit, std::size_t expected)
    : scales(std::move(scales)), limit(limit), expected(expected) {}

Followers Table::unpacked(const std::uint8_t *bytes, std::size_t size, Room &room) const {
    const std::size_t width = scales.wide ? 5 : 3, widest = HEAD + scales.widest * width;
    if (size <= HEAD || size > widest || (size - HEAD) % width) return {};
    Follower *found = room.take(scales.widest);
    int many = 0;
    for (std::size_t at = HEAD; at < size; at += width) {
        Token token = 0;
        for (std::size_t byte = 1; byte < width; ++byte) token |= Token(bytes[at + byte]) << 8 * (byte - 1);
        const double share = scales.shares[bytes[at]];
        int same = 0;
        while (same < many && found[same].token != token) ++same;
        if (same == many) found[many++] = {share, token, static_cast<std::uint32_t>(same)};
        found[same].count = share;
    }
    const double total = scales.counts[bytes[0]], distinct = scales.counts[bytes[1]];
    double sum = 0;
    for (int at = 0; at < many; ++at) {
        sum += found[at].count;
        if (at && found[at].count > found[at - 1].count) return {};
        if (found[at].token >= scales.vocabulary) return {};
    }
    const bool possible = sum <= scales.rounded && many <= distinct * scales.rounded &&
                          distinct <= total * (scales.rounded * scales.rounded) &&
                          total <= scales.tokens * scales.rounded;
    if (!possible) return {};
    for (int at = 0; at < many; ++at) found[at].count *= total;
    return {total, distinct, found, many, strength(total, distinct)};
}

void Table::take(std::uint64_t key, const std::uint8_t *bytes, std::size_t size) {
    if (too_large()) return note(key);
    scratch.clear();
    const Followers found = unpacked(bytes, size, scratch);
    if (!found.size) return;
    coming.emplace_back(key, static_cast<std::uint32_t>(entries.size()));
    entries.push_back(static_cast<std::uint8_t>((size - HEAD) / (scales.wide ? 5 : 3)));
    entries.insert(entries.end(), bytes, bytes + size);
    // Eight bytes of a key and four of its place, a third of the room left empty or more.
    if (entries.size() + coming.size() * 24 > limit) give_up();
}

void Table::note(std::uint64_t key) {
    const std::uint64_t hash = mixed(key);
    std::uint64_t *block = &filter[hash % (filter.size() / LINE) * LINE];
    std::uint64_t bits = mixed(hash);
    for (int probe = 0; probe < PROBES; ++probe, bits >>= 9)
        block[bits >> 6 & 7] |= std::uint64_t(1) << (bits & 63);
}

void Table::give_up() {
    const std::size_t most = std::max(std::min(expected, limit), coming.size());
    filter.assign((most * FILTER_BITS / 512 + 1) * LINE, 0);
    for (const auto &[key, place] : coming) note(key);
    decltype(coming)().swap(coming);
    decltype(entries)().swap(entries);
}

void Table::read(std::string_view text) {
    std::uint8_t bytes[HEAD + 255 * 5];
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find(',', at), text.size());
        const std::string_view one = text.substr(at, end - at);
        at = end + 1;
        std::int64_t key = 0;
        const auto read = std::from_chars(one.data(), one.data() + one.size(), key);
        const char *hex = read.ptr + 1, *last = one.data() + one.size();
        if (read.ec != std::errc() || key <= 0 || hex > last) continue;
        std::size_t size = 0;
        for (; hex + 1 < last && size < sizeof bytes; hex += 2)
            bytes[size++] = static_cast<std::uint8_t>(digit(hex[0]) << 4 | digit(hex[1]));
        take(static_cast<std::uint64_t>(key), bytes, size);
    }
    weigh();
}

void Table::seal() {
    if (!too_large()) {
        std::size_t lines = 1;
        while (lines * LINE * 2 < coming.size() * 3) lines *= 2;
        mask = lines - 1;
        memory = std::make_unique<std::uint64_t[]>((lines + 1) * LINE);
        const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
        keys = memory.get() + (64 - address % 64) % 64 / sizeof(std::uint64_t);
        places.assign(lines * LINE, 0);
        for (const auto &[key, place] : coming) {
            const std::size_t at = find(key);
            count += keys[at] == 0;
            keys[at] = key;
            places[at] = place;
        }
        decltype(coming)().swap(coming);
        entries.shrink_to_fit();
    }
    weigh();
    sealed.store(true, std::memory_order_release);
}

// Where the key is, or the first empty place where it could be.
std::size_t Table::find(std::uint64_t key) const {
    for (std::size_t at = line(key);; at = (at + LINE) & (mask * LINE | (LINE - 1)))
        for (std::size_t place = at; place < at + LINE; ++place)
            if (keys[place] == key || !keys[place]) return place;
}

bool Table::may_hold(std::uint64_t key) const {
    if (!too_large()) return keys[find(key)] == key && key;
    const std::uint64_t hash = mixed(key);
    const std::uint64_t *block = &filter[hash % (filter.size() / LINE) * LINE];
    std::uint64_t bits = mixed(hash);
    for (int probe = 0; probe < PROBES; ++probe, bits >>= 9)
        if (!(block[bits >> 6 & 7] >> (bits & 63) & 1)) return false;
    return true;
}

std::uint64_t Table::packed(const Suffix &suffix, int size) const {
    std::uint64_t key = static_cast<std::uint64_t>(size);
    for (int place = size; place > 0; --place) {
        if (key >> (63 - scales.bits)) return 0;
        key = key << scales.bits | suffix.back(place);
    }
    return key;
}

void Table::expect(const Suffix &suffix, int longest) const {
    for (int size = 1; size <= std::min(suffix.size, longest); ++size)
        prefetch(keys + line(packed(suffix, size)));
}

int Table::matches(const Suffix &suffix, int longest, Followers *found, Room &room) const {
    const int size = std::min(suffix.size, longest);
    std::array<std::uint64_t, LONGEST> asked{};
    for (int at = 0; at < size; ++at) asked[at] = packed(suffix, at + 1);
    int known = 0;
    std::array<const std::uint8_t *, LONGEST> entry{};
    for (; known < size; ++known) {
        const std::size_t at = find(asked[known]);
        if (!asked[known] || keys[at] != asked[known]) break;
        entry[known] = entries.data() + places[at];
        prefetch(entry[known]);
    }
    for (int at = 0; at < known; ++at) found[at] = decoded(entry[at], room);
    return known;
}

Followers Table::decoded(const std::uint8_t *entry, Room &room) const {
    return unpacked(entry + 1, HEAD + entry[0] * (scales.wide ? 5 : 3), room);
}

// Another thread may ask for the bytes meanwhile.
void Table::weigh() {
    taken = coming.capacity() * sizeof coming[0] + places.size() * (sizeof(Token) + sizeof(*keys)) +
            entries.capacity() + filter.size() * sizeof filter[0];
}

}  // namespace strata
