#include "hierarchy.hpp"

#include <numeric>

namespace strata {

Hierarchy::Hierarchy(std::vector<Tier> tiers, Constants constants, Limits limits)
    : tiers(std::move(tiers)), constants(constants), limits(limits),
      answers(this->tiers.size() * LONGEST), lengths(this->tiers.size()) {}

// Answers do not outlive what a tier learns from elsewhere.
void Hierarchy::refresh() {
    std::uint64_t now = 0;
    for (const Tier &tier : tiers) now += tier.source->version();
    if (now != version) forget();
    version = now;
}

void Hierarchy::forget() {
    chains.clear();
    evidence.clear();
    room.clear();
}

Hierarchy::Chain Hierarchy::chain(int asked, const Suffix &suffix) {
    for (const Chain &known : chains)
        if (known.asked == asked && known.suffix == suffix) return known;
    int longest = 0;
    for (int at = 0; at < asked; ++at) tiers[at].source->expect(suffix);
    for (int at = 0; at < asked; ++at) {
        const auto clock = std::chrono::steady_clock::now();
        lengths[at] = tiers[at].source->matches(suffix, &answers[at * LONGEST], room);
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - clock;
        spent[tiers[at].timed] += passed.count();
        longest = std::max(longest, lengths[at]);
    }
    Chain made{suffix, asked, static_cast<int>(evidence.size()), 0};
    for (int at = longest - 1; at >= 0; --at) {
        for (int tier = 0; tier < asked; ++tier) {
            const Followers *matches = &answers[tier * LONGEST];
            // A shorter match at the same places says nothing that the longer one did not.
            if (at < lengths[tier] &&
                (at + 1 == lengths[tier] || matches[at].total > matches[at + 1].total))
                evidence.push_back({&(*tiers[tier].weights)[at], matches[at],
                                    static_cast<std::uint16_t>(tier),
                                    static_cast<std::uint16_t>(at + 1)});
        }
    }
    made.size = static_cast<int>(evidence.size()) - made.first;
    chains.push_back(made);
    return made;
}

// The probability of every next token, the longest match first, each with its first evidence.
void Hierarchy::interpolate(const Chain &chain, double least) {
    found.clear();
    int most = 0;
    for (int at = chain.first; at < chain.first + chain.size; ++at)
        most += evidence[at].followers.size;
    std::uint32_t room = 32;
    while (room < 2u * most) room *= 2;
    places.assign(room, -1);
    double left = 1.0;
    for (int at = chain.first; at < chain.first + chain.size; ++at) {
        const Evidence &each = evidence[at];
        const double said = left * each.weights->values[each.followers.strength];
        const double scale = said / each.followers.total;
        for (int next = 0; next < each.followers.size; ++next) {
            const Follower &follower = each.followers.first[next];
            const double share = scale * follower.count;
            if (share < least) break;
            std::uint32_t place = follower.token * 0x9e3779b1u & (room - 1);
            while (places[place] >= 0 && found[places[place]].token != follower.token)
                place = (place + 1) & (room - 1);
            if (places[place] >= 0) {
                found[places[place]].share += share;
            } else {
                places[place] = static_cast<int>(found.size());
                found.push_back({share, follower.token, at});
            }
        }
        left -= said;
        if (left < least || left < limits.negligible) break;
    }
}

// The candidates whose estimate reaches the floor.
void Hierarchy::expand(const Chain &chain, double floor) {
    interpolate(chain, floor * limits.slight);
    // The likeliest first, of equal ones that which was found first; few of them are asked for.
    const auto behind = [this](int a, int b) {
        return found[a].share != found[b].share ? found[a].share < found[b].share : a > b;
    };
    ranked.resize(found.size());
    std::iota(ranked.begin(), ranked.end(), 0);
    std::make_heap(ranked.begin(), ranked.end(), behind);
    std::size_t number = 0;
    for (auto end = ranked.end(); end != ranked.begin(); --end) {
        std::pop_heap(ranked.begin(), end, behind);
        const Found &each = found[*(end - 1)];
        const Evidence &origin = evidence[each.origin];
        const std::size_t rank = std::min(number, origin.weights->rates.size() - 1);
        const double factor = origin.weights->rates[rank][2];
        // Scaling halves what is left to certainty at most.
        const double scaled = std::min(each.share * factor, (1.0 + each.share) / 2);
        if (scaled < floor) break;
        candidates.push_back({scaled, each.share, each.token, origin.tier, origin.match_length,
                              static_cast<std::uint16_t>(rank)});
        ++number;
    }
}

// The row of a node, which is made unless it is there.
int Hierarchy::add(const Plan &plan, int parent, const Candidate &candidate, bool &known) {
    known = true;
    if (parent <= plan.before)
        for (int row = 1; row <= plan.before; ++row)
            if (plan.parents[row - 1] == parent && plan.tokens[row - 1] == candidate.token)
                return row;
    known = false;
    drafted.push_back({parent, candidate});
    return plan.before + static_cast<int>(drafted.size());
}

void Hierarchy::grow(Plan &plan) {
    std::fill(spent.begin(), spent.end(), 0.0);
    drafted.clear();
    candidates.clear();
    expanded.clear();
    heap.clear();
    refresh();
    const int all = static_cast<int>(tiers.size());
    const int asked = plan.near && all > 1 ? all - 1 : all;
    std::uint32_t number = 0;
    int size = plan.before;
    double probability = 1.0;
    Expanded here{plan.suffix, 0, 0};
    // No node is likelier than the one added last: once that would not pay again, none does.
    while (plan.nodes && plan.pays(size, probability)) {
        if (here.depth < plan.depth) {
            const std::size_t first = candidates.size();
            expand(chain(asked, here.suffix), plan.floor / probability);
            for (std::size_t at = first; at < candidates.size(); ++at) {
                if (candidates[at].token >= plan.vocabulary) continue;
                heap.push_back({candidates[at].probability * probability, ++number,
                                static_cast<int>(expanded.size()), static_cast<int>(at)});
                std::push_heap(heap.begin(), heap.end());
            }
            expanded.push_back(here);
        }
        if (heap.empty() || !plan.pays(size, heap.front().probability)) break;
        std::pop_heap(heap.begin(), heap.end());
        const Item likeliest = heap.back();
        heap.pop_back();
        if (!heap.empty()) expect(asked, heap.front());
        const Candidate &candidate = candidates[likeliest.candidate];
        probability = likeliest.probability;
        here = expanded[likeliest.parent];
        bool known;
        here.row = add(plan, here.row, candidate, known);
        if (!known) plan.added(++size, probability);
        here.suffix.push(candidate.token);
        ++here.depth;
    }
    const std::size_t kept = std::max(plan.best - plan.before, 0);
    if (kept < drafted.size()) drafted.resize(kept);
}

// What is likeliest after the next node will probably be asked for then.
void Hierarchy::expect(int asked, const Item &item) {
    Suffix suffix = expanded[item.parent].suffix;
    suffix.push(candidates[item.candidate].token);
    for (int at = 0; at < asked; ++at) tiers[at].source->expect(suffix);
}

void Hierarchy::settle(const Candidate &candidate, bool accepted) {
    double *rate = (*tiers[candidate.tier].weights)[candidate.match_length - 1].rates[candidate.rank];
    rate[0] += candidate.share;
    rate[1] += accepted ? 1.0 : 0.0;
    if (rate[0] > constants.memory) {
        rate[0] /= 2;
        rate[1] /= 2;
    }
    rate[2] = (constants.prior_observations + rate[1]) / (constants.prior_observations + rate[0]);
}

void Hierarchy::learn(Suffix suffix, const std::vector<Token> &said) {
    refresh();
    for (const Token token : said) {
        const Chain known = chain(static_cast<int>(tiers.size()), suffix);
        const Evidence *each = evidence.data() + known.first, *end = each + known.size;
        double left = 1.0, total = 0.0;
        shares.clear();
        for (; each < end; ++each) {
            const Followers &followers = each->followers;
            const double weight = each->weights->values[followers.strength];
            double count = 0.0;
            for (int at = 0; at < followers.size; ++at)
                if (followers.first[at].token == token) count = followers.first[at].count;
            shares.push_back(left * weight * count / followers.total);
            total += shares.back();
            left *= 1.0 - weight;
        }
        total += left * constants.unseen;
        double reached = 1.0;
        for (int at = 0; at < known.size; ++at) {
            const Evidence &learned = evidence[known.first + at];
            const Weights &weights = *learned.weights;
            const int strength = learned.followers.strength;
            const double credited = shares[at] / total;
            weights.reached[strength] += reached;
            weights.credited[strength] += credited;
            if (weights.reached[strength] > constants.memory) {
                weights.reached[strength] /= 2;
                weights.credited[strength] /= 2;
            }
            weights.values[strength] =
                (constants.prior_observations * weights.priors[strength] +
                 weights.credited[strength]) /
                (constants.prior_observations + weights.reached[strength]);
            reached -= credited;
            if (reached < 1e-3) break;
        }
        suffix.push(token);
    }
}

}  // namespace strata
