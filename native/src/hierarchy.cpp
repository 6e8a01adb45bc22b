#include "hierarchy.hpp"

namespace strata {

Hierarchy::Hierarchy(std::vector<Tier> tiers, Constants constants, Limits limits, Dice dice,
                     Errors errors)
    : tiers(std::move(tiers)), constants(constants), limits(limits), dice(dice), errors(errors),
      answers(this->tiers.size() * CLASSES), lengths(this->tiers.size()) {}

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
    laws.clear();
    named.clear();
    room.clear();
    for (std::size_t at = 0; at < lucky.size(); ++at)
        if (!tiers[at].source->lasting()) lucky[at].fill({});
}

void Hierarchy::forget(const Suffix &suffix) {
    const auto stale = [&](const auto &known) { return known.suffix == suffix; };
    chains.erase(std::remove_if(chains.begin(), chains.end(), stale), chains.end());
    laws.erase(std::remove_if(laws.begin(), laws.end(), stale), laws.end());
}

Hierarchy::Chain Hierarchy::chain(int asked, const Suffix &suffix) {
    for (const Chain &known : chains)
        if (known.asked == asked && known.suffix == suffix) return known;
    int longest = 0;
    for (int at = 0; at < asked; ++at) tiers[at].source->expect(suffix);
    for (int at = 0; at < asked; ++at) {
        const auto clock = std::chrono::steady_clock::now();
        lengths[at] = tiers[at].source->matches(suffix, &answers[at * CLASSES], room);
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - clock;
        spent[tiers[at].timed] += passed.count();
        longest = std::max(longest, lengths[at]);
    }
    Chain made{suffix, asked, static_cast<int>(evidence.size()), 0};
    for (int at = longest - 1; at >= 0; --at) {
        for (int tier = 0; tier < asked; ++tier) {
            const Followers *matches = &answers[tier * CLASSES];
            // A shorter match at the same places says nothing that the longer one did not.
            if (at < lengths[tier] &&
                (at + 1 == lengths[tier] || matches[at].total > matches[at + 1].total))
                evidence.push_back({&(*tiers[tier].weights)[at + 1], matches[at],
                                    static_cast<std::uint16_t>(tier),
                                    static_cast<std::uint16_t>(at + 1)});
        }
    }
    made.size = static_cast<int>(evidence.size()) - made.first;
    chains.push_back(made);
    return made;
}

// Add what one piece of evidence says to the probabilities of next tokens.
void Hierarchy::name(const Evidence &each, int number, double left, double least) {
    const double said = left * each.weights->values[each.followers.strength];
    const double scale = said / each.followers.total;
    const std::uint32_t most = static_cast<std::uint32_t>(places.size()) - 1;
    for (int next = 0; next < each.followers.size; ++next) {
        const Follower &follower = each.followers.first[next];
        const double share = scale * follower.count;
        if (share < least) break;
        std::uint32_t place = follower.token * 0x9e3779b1u & most;
        while (places[place] >= 0 && found[places[place]].token != follower.token)
            place = (place + 1) & most;
        if (places[place] >= 0) {
            found[places[place]].share += share;
        } else {
            places[place] = static_cast<int>(found.size());
            found.push_back({share, follower.token, number});
        }
    }
}

// The probability of every next token, the longest match first, each with its first evidence; what
// is left.
double Hierarchy::interpolate(const Chain &chain, double least) {
    found.clear();
    std::size_t most = limits.luckiest * tiers.size(), size = 32;
    for (int at = chain.first; at < chain.first + chain.size; ++at)
        most += evidence[at].followers.size;
    while (size < 2 * most) size *= 2;
    places.assign(size, -1);
    double left = 1.0;
    for (int at = chain.first; at < chain.first + chain.size; ++at) {
        const Evidence &each = evidence[at];
        name(each, at, left, least);
        left -= left * each.weights->values[each.followers.strength];
        if (left < least || left < limits.negligible) break;
    }
    return left;
}

// The candidates whose estimate reaches the floor.
void Hierarchy::expand(int asked, const Expanded &here, std::uint64_t position, double floor) {
    if (!dice.temperature) {
        interpolate(chain(asked, here.suffix), floor * limits.slight);
        return select(floor);
    }
    const Law known = law(asked, here.suffix, position);
    if (!known.size) return;
    chances.resize(known.size);
    errors.estimates(names(known), dice.temperature, constants.ranges, chances.data());
    found.clear();
    for (int at = 0; at < known.size; ++at) {
        const Named &each = named[known.first + at];
        found.push_back({chances[at], each.token, each.origin});
    }
    select(floor);
}

// Apply the rates to what was found, and keep what reaches the floor.
void Hierarchy::select(double floor) {
    ranked.resize(found.size());
    for (std::size_t at = 0; at < found.size(); ++at)
        ranked[at] = {found[at].share, static_cast<int>(at)};
    // The likeliest first, of equal ones that which was found first.
    std::sort(ranked.begin(), ranked.end(), [](const Ranked &a, const Ranked &b) {
        return a.share != b.share ? a.share > b.share : a.at < b.at;
    });
    std::size_t number = 0;
    for (const Ranked &next : ranked) {
        const Found &each = found[next.at];
        const Evidence &origin = evidence[each.origin];
        const auto &rates = dice.temperature ? origin.weights->noisy_rates : origin.weights->rates;
        const std::size_t rank = std::min(number, rates.size() - 1);
        const double factor = rates[rank][2];
        // Scaling halves what is left to certainty at most.
        const double scaled = std::min(each.share * factor, (1.0 + each.share) / 2);
        if (scaled < floor) break;
        candidates.push_back({scaled, each.share, each.token, origin.tier, origin.match_length,
                              static_cast<std::uint16_t>(rank)});
        ++number;
    }
}

// What may follow a suffix at a position; of size 0 where nothing is known.
Hierarchy::Law Hierarchy::law(int asked, const Suffix &suffix, std::uint64_t position) {
    for (const Law &known : laws)
        if (known.position == position && known.asked == asked && known.suffix == suffix)
            return known;
    const Chain before = chain(asked, suffix);
    double left = interpolate(before, 0.0);
    const int lucky = static_cast<int>(found.size());
    // Where nothing is known, others may know more than luck does.
    if (lucky > 0 && left >= limits.negligible) {
        for (int tier = 0; tier < asked; ++tier) {
            const Followers often = luckiest(tier, position);
            if (!often.total) continue;
            const Weights &weights = (*tiers[tier].weights)[0];
            evidence.push_back({&weights, often, static_cast<std::uint16_t>(tier), 0});
            name(evidence.back(), static_cast<int>(evidence.size()) - 1, left, 0.0);
            left -= left * weights.values[often.strength];
        }
    }
    Law made{suffix, position, asked, static_cast<int>(named.size()),
             static_cast<int>(found.size()), lucky};
    const std::uint64_t key = noise::key(dice.seed, position);
    double share = 1.0, log = 0.0;
    for (const Found &each : found) {
        // What was said equally often comes one after the other.
        if (each.share != share) log = std::log(share = each.share);
        const double luck = noise::gumbel(key, each.token);
        named.push_back({each.share, log, luck, each.token, each.origin});
    }
    laws.push_back(made);
    return made;
}

// Of what a tier has often seen, the tokens that the noise of a position favours most.
//
// The score of a token is at most log(count / (1 - share)) for the share that its draw is of all
// draws, so few logarithms are needed.
Followers Hierarchy::luckiest(int tier, std::uint64_t position) {
    Source &source = *tiers[tier].source;
    if (lucky.empty()) {
        lucky.resize(tiers.size());
        lucky_tokens.resize(tiers.size());
    }
    Lucky &known = lucky[tier][position % LUCKY];
    if (known.position == position && known.version == source.version()) return known.often;
    const Followers often = source.often(room);
    const std::uint64_t key = noise::key(dice.seed, position);
    const std::size_t wanted = std::min<std::size_t>(limits.luckiest, often.size);
    lucks.clear();
    const auto exactly = [&](int at) {
        const Follower &each = often.first[at];
        const double luck = noise::gumbel(key, each.token);
        lucks.push_back({-std::log(each.count) - luck, each.token, each.count});
    };
    double least = 0.0;
    for (int at = 0; at < often.size; ++at) {
        const double missing = (1u << noise::BITS) - 0.5 - noise::bits(key, often.first[at].token);
        if (often.first[at].count < least * missing) continue;
        exactly(at);
        std::sort(lucks.begin(), lucks.end());
        if (lucks.size() > wanted) lucks.resize(wanted);
        // Rounding of the noise, and of this.
        if (lucks.size() == wanted)
            least = std::exp(-lucks.back().score) * (1 - 1e-4) / (1u << noise::BITS);
    }
    auto &tokens = lucky_tokens[tier][position % LUCKY];
    for (std::size_t at = 0; at < lucks.size(); ++at)
        tokens[at] = {lucks[at].count, lucks[at].token, static_cast<std::uint32_t>(at)};
    known = {position, source.version(), often};
    known.often.first = tokens.data();
    known.often.size = static_cast<int>(lucks.size());
    return known.often;
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
            expand(asked, here, plan.position + here.depth, plan.floor / probability);
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
    const Weights &weights = (*tiers[candidate.tier].weights)[candidate.match_length];
    double *rate = (dice.temperature ? weights.noisy_rates : weights.rates)[candidate.rank];
    rate[0] += candidate.share;
    rate[1] += accepted ? 1.0 : 0.0;
    if (rate[0] > constants.memory) {
        rate[0] /= 2;
        rate[1] /= 2;
    }
    rate[2] = (constants.prior_observations + rate[1]) / (constants.prior_observations + rate[0]);
}

void Hierarchy::learn(Suffix suffix, std::uint64_t position, const std::vector<Token> &said) {
    refresh();
    const int all = static_cast<int>(tiers.size());
    for (const Token token : said) {
        if (dice.temperature) judge(law(all, suffix, position), token);
        learn(chain(all, suffix), token);
        suffix.push(token);
        ++position;
    }
}

// Learn how far the noise could be trusted.
void Hierarchy::judge(const Law &law, Token said) {
    if (!law.size) return;
    const Named *first = named.data() + law.first;
    int number = 0;
    while (number < law.size && first[number].token != said) ++number;
    chances.resize(law.size);
    errors.learn(names(law), dice.temperature, number < law.size ? number : -1, constants.ranges,
                 chances.data());
}

// Learn what a chain of evidence was worth, and what is often said.
void Hierarchy::learn(const Chain &chain, Token said) {
    pieces.assign(evidence.begin() + chain.first, evidence.begin() + chain.first + chain.size);
    for (std::size_t tier = 0; dice.temperature && tier < tiers.size(); ++tier) {
        const Followers often = tiers[tier].source->often(room);
        if (often.total) pieces.push_back({&(*tiers[tier].weights)[0], often, 0, 0});
    }
    double left = 1.0, total = 0.0;
    shares.clear();
    for (const Evidence &each : pieces) {
        const double weight = each.weights->values[each.followers.strength];
        shares.push_back(left * weight * each.followers.count(said) / each.followers.total);
        total += shares.back();
        left *= 1.0 - weight;
    }
    total += left * constants.unseen;
    double reached = 1.0;
    for (std::size_t at = 0; at < pieces.size(); ++at) {
        const Weights &weights = *pieces[at].weights;
        const int strength = pieces[at].followers.strength;
        const double credited = shares[at] / total;
        weights.reached[strength] += reached;
        weights.credited[strength] += credited;
        if (weights.reached[strength] > constants.memory) {
            weights.reached[strength] /= 2;
            weights.credited[strength] /= 2;
        }
        weights.values[strength] = (constants.prior_observations * weights.priors[strength] +
                                    weights.credited[strength]) /
                                   (constants.prior_observations + weights.reached[strength]);
        reached -= credited;
        if (reached < 1e-3) break;
    }
}

}  // namespace strata
