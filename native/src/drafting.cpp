// The compiled drafting as Python sees it. Whatever touches a Python object is in this file.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <unordered_map>

#include "copies.hpp"
#include "hierarchy.hpp"
#include "module.hpp"
#include "ngrams.hpp"
#include "statistics.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace strata {

using Array = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The last tokens of a list.
static Suffix suffix_of(nb::handle tokens, Py_ssize_t end, int longest = WINDOW) {
    Suffix suffix;
    for (Py_ssize_t at = std::max<Py_ssize_t>(0, end - longest); at < end; ++at)
        suffix.push(nb::cast<Token>(tokens[at]));
    return suffix;
}

static nb::tuple tuple_of(const Token *first, int size) {
    nb::list made;
    for (int at = 0; at < size; ++at) made.append(first[at]);
    return nb::tuple(made);
}

// (total, distinct, {token: count}), the tokens in the order in which they came.
static nb::tuple python_of(const Followers &followers) {
    std::vector<Follower> came(followers.first, followers.first + followers.size);
    std::sort(came.begin(), came.end(),
              [](const Follower &a, const Follower &b) { return a.place < b.place; });
    nb::dict counts;
    for (const Follower &each : came) counts[nb::int_(each.token)] = each.count;
    return nb::make_tuple(followers.total, followers.distinct, counts);
}

static nb::list python_of(Source &source, nb::handle suffix) {
    Room room;
    Followers found[CLASSES];
    const int size = source.matches(suffix_of(suffix, nb::len(suffix)), found, room);
    nb::list made;
    for (int at = 0; at < size; ++at) made.append(python_of(found[at]));
    return made;
}

// What a tier written in Python says, kept apart from its objects.
class Known {
  public:
    explicit Known(nb::handle followers) {
        told.total = nb::cast<double>(followers.attr("total"));
        told.distinct = nb::cast<double>(followers.attr("distinct"));
        told.strength = nb::cast<int>(followers.attr("strength"));
        if (!(told.total > 0) || told.strength < 0 || told.strength >= 35)
            throw nb::value_error("followers without occurrences");
        for (nb::handle pair : followers.attr("counts").attr("items")())
            own.push_back({nb::cast<double>(pair[1]), nb::cast<Token>(pair[0]),
                           static_cast<std::uint32_t>(own.size())});
        if (own.size() > Room::BLOCK) throw nb::value_error("followers of too many kinds");
        rank(own.data(), static_cast<int>(own.size()));
    }
    // The same, which lasts as long as this.
    Followers here() const {
        Followers made = told;
        made.first = own.data();
        made.size = static_cast<int>(own.size());
        return made;
    }
    Followers in(Room &room) const {
        Followers made = here();
        Follower *copied = room.take(made.size);
        std::copy(own.begin(), own.end(), copied);
        made.first = copied;
        return made;
    }

  private:
    Followers told;
    std::vector<Follower> own;
};

// A tier that is written in Python.
class Asked : public Source {
  public:
    Asked(nb::callable ask, nb::callable ask_often)
        : ask(std::move(ask)), ask_often(std::move(ask_often)) {}
    int matches(const Suffix &suffix, Followers *found, Room &room) override {
        nb::gil_scoped_acquire held;
        const nb::object said = ask(tuple_of(suffix.tokens.data(), suffix.size));
        int size = 0;
        for (nb::handle each : said) {
            if (size == CLASSES) throw nb::value_error("a match of more than eleven lengths");
            found[size++] = Known(each).in(room);
        }
        return size;
    }
    Followers often(Room &room) override {
        nb::gil_scoped_acquire held;
        const nb::object said = ask_often();
        return said.is_none() ? Followers{} : Known(said).in(room);
    }
    bool lasting() const override { return false; }

  private:
    nb::callable ask, ask_often;
};

// The guesses of a head, each for one suffix.
class Guessed : public Source {
  public:
    void add(nb::handle suffix, nb::handle matches) {
        guesses.push_back({suffix_of(suffix, static_cast<Py_ssize_t>(nb::len(suffix))), {}});
        for (nb::handle each : matches) guesses.back().second.emplace_back(each);
        if (guesses.back().second.size() > CLASSES)
            throw nb::value_error("a match of more than eleven lengths");
    }
    void clear() { guesses.clear(); }
    int matches(const Suffix &suffix, Followers *found, Room &room) override {
        for (const auto &[known, lengths] : guesses) {
            if (!(known == suffix)) continue;
            for (const Known &each : lengths) *found++ = each.in(room);
            return static_cast<int>(lengths.size());
        }
        return 0;
    }

  private:
    std::vector<std::pair<Suffix, std::vector<Known>>> guesses;
};

// The statistics tier. What the table in memory cannot answer, Python is asked for.
class Statistics : public Source {
  public:
    Statistics(nb::callable ask, nb::callable ask_often, const Table *table, int longest,
               std::size_t remembered)
        : ask(std::move(ask)), ask_often(std::move(ask_often)), table(table), longest(longest),
          remembered(remembered) {}
    Statistics(const Statistics &) = delete;

    int matches(const Suffix &suffix, Followers *found, Room &room) override {
        const bool ready = table && table->ready();
        if (ready && !table->too_large()) return table->matches(suffix, longest, found, room);
        const int most = std::min(suffix.size, longest);
        for (int size = 1; size <= most; ++size) {
            const std::uint64_t packed = ready ? table->packed(suffix, size) : 0;
            if (ready && (!packed || !table->may_hold(packed))) return size - 1;
            found[size - 1] = look_up(suffix, size, room);
            if (!found[size - 1].total) return size - 1;
        }
        return most;
    }
    Followers often(Room &) override {
        if (!asked_often) {
            nb::gil_scoped_acquire held;
            const nb::object said = ask_often();
            if (!said.is_none()) said_often = std::make_unique<Known>(said);
            asked_often = true;
        }
        return said_often ? said_often->here() : Followers{};
    }

    void expect(const Suffix &suffix) override {
        if (table && table->ready() && !table->too_large()) table->expect(suffix, longest);
    }

  private:
    Followers look_up(const Suffix &suffix, int size, Room &room) {
        std::array<Token, 4> key{};
        key[3] = static_cast<Token>(size);
        for (int at = 0; at < size; ++at) key[at] = suffix.back(size - at);
        auto known = answers.find(key);
        if (known == answers.end()) {
            nb::gil_scoped_acquire held;
            if (answers.size() >= remembered) answers.clear();
            const nb::object said = ask(tuple_of(key.data(), size));
            std::unique_ptr<Known> made;
            if (!said.is_none()) made = std::make_unique<Known>(said);
            known = answers.emplace(key, std::move(made)).first;
        }
        return known->second ? known->second->in(room) : Followers{};
    }
    struct Hash {
        std::size_t operator()(const std::array<Token, 4> &key) const {
            std::uint64_t hash = 0;
            for (const Token token : key) hash = mixed(hash + token + 1);
            return hash;
        }
    };
    nb::callable ask, ask_often;
    bool asked_often = false;
    std::unique_ptr<Known> said_often;
    const Table *table;
    int longest;
    std::size_t remembered;
    std::unordered_map<std::array<Token, 4>, std::unique_ptr<Known>, Hash> answers;
};

// The arrays of a Calibration, and what keeps them there.
class Calibration {
  public:
    // `weights` holds the EvidenceWeights of each tier: what is often said, then by match length.
    Calibration(nb::dict weights, nb::handle errors, const Constants &constants)
        : constants(constants),
          errors{array(errors.attr("values")), array(errors.attr("precisions"))} {
        for (auto [name, lengths] : weights) {
            auto &made = tiers[nb::cast<std::string>(name)];
            for (nb::handle each : lengths) {
                made.push_back({array(each.attr("values")), array(each.attr("priors")),
                                array(each.attr("reached")), array(each.attr("credited")),
                                rates(each.attr("rates")), rates(each.attr("noisy_rates"))});
            }
            if (made.size() != CLASSES + 1) throw nb::value_error("weights of eleven match lengths");
        }
    }
    const std::vector<Weights> *of(const std::string &tier) const { return &tiers.at(tier); }

  private:
    std::vector<Array> kept;  // before what is made of them
    double *array(nb::handle from) {
        kept.push_back(nb::cast<Array>(from));
        return kept.back().data();
    }
    std::vector<double *> rates(nb::handle from) {
        std::vector<double *> made;
        for (nb::handle rate : from) made.push_back(array(rate.attr("figures")));
        return made;
    }
    std::unordered_map<std::string, std::vector<Weights>> tiers;

  public:
    const Constants constants;
    const Errors errors;
};

static void make_calibration(Calibration *made, nb::dict weights, nb::handle errors,
                             double prior_observations, double memory, double unseen, double least, double trust_memory,
                             const std::vector<std::pair<double, double>> &ranges) {
    Constants constants{prior_observations, memory, unseen, {least, trust_memory, {}, {}}};
    if (ranges.size() != 4) throw nb::value_error("ranges of four values");
    for (int at = 0; at < 4; ++at) {
        constants.ranges.low[at] = ranges[at].first;
        constants.ranges.high[at] = ranges[at].second;
    }
    new (made) Calibration(weights, errors, constants);
}

// Names of attributes, made once: a draft asks for dozens.
struct Attributes {
    nb::object nodes = made("nodes"), depth = made("depth"), best = made("best"),
               vocabulary = made("vocabulary"), near = made("near"), owed = made("owed"),
               floor = made("floor"), expected = made("expected"), worth = made("worth"),
               costs = made("costs"), cheapest = made("cheapest"), slopes = made("slope_array"),
               table = made("table_array"), tokens = made("tokens"), parents = made("parents"),
               depths = made("depths"), sources = made("sources"),
               match_lengths = made("match_lengths"), children = made("children");

    static nb::object made(const char *name) {
        return nb::steal(PyUnicode_InternFromString(name));
    }
};

// As long as the program runs: it may end in any order.
static const Attributes &attributes() {
    static const Attributes *const made = new Attributes;
    return *made;
}

static double number(nb::handle of, const nb::object &name) {
    return nb::cast<double>(of.attr(name));
}

// The first numbers of an array, and no more: a small tree asks for few of them.
static std::vector<double> numbers(nb::handle array, int size) {
    Py_buffer view;
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
    const auto *first = static_cast<const double *>(view.buf);
    const auto most = std::min<Py_ssize_t>(size, view.len / sizeof(double));
    std::vector<double> made(first, first + most);
    PyBuffer_Release(&view);
    if (most < size) throw nb::value_error("a cost curve of fewer nodes than the tree may have");
    return made;
}

// The hierarchy with the Python values around it: Budget and Tree are those of the reference.
class Drafter {
  public:
    // `tiers` holds (source, name, what its tokens are credited to, what its time is counted to).
    // A temperature of 0 says that the noise is not known.
    Drafter(nb::list tiers, const Calibration &calibration, double negligible, double slight,
            int luckiest, double temperature, std::uint64_t seed, nb::callable work)
        : work(std::move(work)), hierarchy(specified(tiers, calibration), calibration.constants,
                    {negligible, slight, luckiest}, {temperature, seed}, calibration.errors) {
        hierarchy.spent.resize(sources.size());
    }

    Plan plan(nb::handle tree, nb::handle tokens, nb::handle budget) const {
        const Attributes &name = attributes();
        Plan made;
        made.position = nb::len(tokens);
        made.suffix = suffix_of(tokens, static_cast<Py_ssize_t>(made.position));
        made.nodes = nb::cast<int>(budget.attr(name.nodes));
        made.depth = nb::cast<int>(budget.attr(name.depth));
        made.best = nb::cast<int>(budget.attr(name.best));
        made.vocabulary = nb::cast<std::uint64_t>(budget.attr(name.vocabulary));
        made.near = nb::cast<bool>(budget.attr(name.near));
        made.due = nb::cast<bool>(budget.attr(name.owed));
        made.floor = number(budget, name.floor);
        made.expected = number(budget, name.expected);
        made.worth = number(budget, name.worth);
        const nb::object costs = budget.attr(name.costs);
        made.measured = !costs.is_none();
        if (made.measured && made.nodes) {
            made.cheapest = number(costs, name.cheapest);
            made.slopes = numbers(costs.attr(name.slopes), made.nodes + 1);
            made.table = numbers(costs.attr(name.table), made.nodes + 1);
        }
        const nb::list rows = tree.attr(name.tokens);
        made.before = static_cast<int>(nb::len(rows)) - 1;
        if (made.before) {
            const nb::list parents = tree.attr(name.parents);
            for (int row = 1; row <= made.before; ++row) {
                made.tokens.push_back(nb::cast<Token>(rows[row]));
                made.parents.push_back(nb::cast<int>(parents[row]));
            }
        }
        return made;
    }

    // Bring the tree and the budget to what was grown.
    void put(const Plan &plan, nb::handle tree, nb::handle budget) {
        before = plan.before;
        const Attributes &name = attributes();
        budget.attr(name.floor) = plan.floor;
        budget.attr(name.expected) = plan.expected;
        budget.attr(name.best) = plan.best;
        budget.attr(name.worth) = plan.worth;
        if (hierarchy.drafted.empty()) return;
        nb::list tokens = tree.attr(name.tokens), parents = tree.attr(name.parents),
                 depths = tree.attr(name.depths), origins = tree.attr(name.sources),
                 lengths = tree.attr(name.match_lengths), children = tree.attr(name.children);
        int row = plan.before;
        for (const Node &node : hierarchy.drafted) {
            const nb::int_ token(node.candidate.token);
            nb::dict siblings = children[node.parent];
            siblings[token] = ++row;
            tokens.append(token);
            parents.append(node.parent);
            depths.append(nb::cast<int>(depths[node.parent]) + 1);
            origins.append(credited(node.candidate));
            lengths.append(least_length(node.candidate.match_length));
            children.append(nb::dict());
        }
    }

    nb::dict grow(nb::handle tree, nb::handle tokens, nb::handle budget) {
        Plan made = plan(tree, tokens, budget);
        {
            nb::gil_scoped_release released;
            hierarchy.grow(made);
        }
        put(made, tree, budget);
        return spent();
    }

    // The probability of the path to each row that was grown, where the tree was empty before.
    std::vector<double> chances() const {
        std::vector<double> made{1.0};
        for (const Node &node : hierarchy.drafted)
            made.push_back(node.candidate.probability * made[node.parent]);
        return made;
    }

    // What the look-ups took, by what they are counted to.
    nb::dict spent() const {
        nb::dict made;
        for (std::size_t at = 0; at < sources.size(); ++at)
            made[sources[at]] = work(hierarchy.spent[at]);
        return made;
    }

    // Learn what the evidence for the last `fresh` tokens was worth; the tree was grown before them.
    void learn(nb::handle tree, nb::handle tokens, Py_ssize_t fresh) {
        const Py_ssize_t size = static_cast<Py_ssize_t>(nb::len(tokens));
        std::vector<Token> said;
        for (Py_ssize_t at = size - fresh; at < size; ++at) said.push_back(nb::cast<Token>(tokens[at]));
        settle(tree, said);
        const Suffix suffix = suffix_of(tokens, size - fresh);
        nb::gil_scoped_release released;
        hierarchy.learn(suffix, static_cast<std::uint64_t>(size - fresh), said);
    }
    // Of these suffixes, or of all for None.
    void forget(nb::handle suffixes) {
        if (suffixes.is_none()) return hierarchy.forget();
        for (nb::handle each : suffixes)
            hierarchy.forget(suffix_of(each, static_cast<Py_ssize_t>(nb::len(each))));
    }

    std::vector<nb::object> sources;  // before the hierarchy, whose tiers are numbered by it
    nb::callable work;
    Hierarchy hierarchy;
    int before = 0;  // rows of the tree that were there

  private:
    nb::handle credited(const Candidate &candidate) const {
        return sources[hierarchy.tiers[candidate.tier].credited];
    }

    // Count the drafted nodes whose parents were visited, and whether they were accepted.
    void settle(nb::handle tree, const std::vector<Token> &said) {
        const nb::list children = tree.attr(attributes().children), origins = tree.attr(attributes().sources);
        const int size = static_cast<int>(hierarchy.drafted.size()), first = before + 1;
        int row = 0;
        for (const Token token : said) {
            const nb::dict drafted = children[row];
            int next = -1;
            for (auto [key, child] : drafted) {
                const Token name = nb::cast<Token>(key);
                const int at = nb::cast<int>(child) - first;
                if (name == token) next = at + first;
                if (at < 0 || at >= size) continue;
                const Candidate &candidate = hierarchy.drafted[at].candidate;
                // A drafter behind this one may have put its own draft in the place of ours.
                if (candidate.token == name && origins[at + first].equal(credited(candidate)))
                    hierarchy.settle(candidate, name == token);
            }
            if (next < 0) break;
            row = next;
        }
        hierarchy.drafted.clear();  // the next step may go by without a draft from here
    }

    int numbered(nb::handle source) {
        for (std::size_t at = 0; at < sources.size(); ++at)
            if (sources[at].equal(source)) return static_cast<int>(at);
        sources.push_back(nb::borrow(source));
        return static_cast<int>(sources.size()) - 1;
    }
    std::vector<Tier> specified(nb::list tiers, const Calibration &calibration) {
        std::vector<Tier> made;
        for (nb::handle each : tiers)
            made.push_back({nb::cast<Source *>(each[0]), calibration.of(nb::cast<std::string>(each[1])),
                            numbered(each[2]), numbered(each[3])});
        return made;
    }
};

// Grow the trees of many sequences in one call; each is (drafter, tree, tokens, budget).
static nb::list grow_all(nb::list sequences) {
    std::vector<Drafter *> drafters;
    std::vector<Plan> plans;
    for (nb::handle each : sequences) {
        drafters.push_back(nb::cast<Drafter *>(each[0]));
        plans.push_back(drafters.back()->plan(each[1], each[2], each[3]));
    }
    {
        nb::gil_scoped_release released;
        for (std::size_t at = 0; at < plans.size(); ++at) drafters[at]->hierarchy.grow(plans[at]);
    }
    nb::list spent;
    for (std::size_t at = 0; at < plans.size(); ++at) {
        drafters[at]->put(plans[at], sequences[at][1], sequences[at][3]);
        spent.append(drafters[at]->spent());
    }
    return spent;
}

static void make_table(Table *made, std::vector<double> counts, std::vector<double> shares,
                       double rounded, double tokens, std::uint64_t vocabulary, int bits,
                       int widest, bool wide, std::size_t limit, std::size_t expected) {
    if (counts.size() != 256 || shares.size() != 256 || bits < 1 || bits > 20)
        throw nb::value_error("scales of 256 numbers and tokens of up to 20 bits");
    Scales scales{std::move(counts), std::move(shares), rounded, tokens, vocabulary,
                  bits, widest, wide};
    new (made) Table(std::move(scales), limit, expected);
}

}  // namespace strata

void bind_drafting(nb::module_ &module) {
    using namespace strata;
    nb::class_<Source>(module, "Source")
        .def("matches", [](Source &self, nb::handle suffix) { return python_of(self, suffix); })
        .def("often", [](Source &self) -> nb::object {
            Room room;
            const Followers found = self.often(room);
            return found.total ? nb::object(python_of(found)) : nb::none();
        });
    nb::class_<Counts, Source>(module, "Counts")
        .def(nb::init<int>())
        .def("add",
             [](Counts &self, nb::handle key, Token token, double count) {
                 if (!(count > 0)) throw nb::value_error("a count of none");
                 const Suffix suffix = suffix_of(key, static_cast<Py_ssize_t>(nb::len(key)));
                 return self.add(suffix.tokens.data() + suffix.size, suffix.size, token, count);
             })
        .def("read",
             [](Counts &self, const std::vector<Token> &tokens, std::size_t first) {
                 nb::gil_scoped_release released;
                 self.read(tokens, first);
             })
        .def("items",
             [](const Counts &self) {
                 nb::list made;
                 self.each([&](const Token *key, int size, const Followers &followers) {
                     made.append(nb::make_tuple(tuple_of(key, size), python_of(followers)));
                 });
                 return made;
             })
        .def("clear", &Counts::clear)
        .def_prop_ro("bytes", &Counts::bytes);
    nb::class_<Less, Source>(module, "Less")
        .def(nb::init<Source &, Source &>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
    nb::class_<Copies>(module, "Copies")
        .def(nb::init<>())
        .def("read",
             [](Copies &self, const std::vector<Token> &tokens) {
                 nb::gil_scoped_release released;
                 self.read(tokens.data(), tokens.size());
             })
        .def("end", &Copies::end)
        .def("remove", &Copies::remove)
        .def("clear", &Copies::clear)
        .def("part",
             [](const Copies &self, std::size_t start, std::size_t end) {
                 nb::list made;
                 for (std::size_t at = start; at < std::min(end, self.size()); ++at)
                     made.append(self.token(at));
                 return made;
             })
        .def("longest",
             [](const Copies &self, nb::handle suffix, const Copies::Parts &hidden) {
                 Room room;
                 Followers found;
                 const Suffix last = suffix_of(suffix, static_cast<Py_ssize_t>(nb::len(suffix)));
                 const int length = self.longest(last, found, room, hidden);
                 return nb::make_tuple(length, length ? nb::object(python_of(found)) : nb::none());
             })
        .def("__len__", &Copies::size)
        .def_prop_ro("bytes", &Copies::bytes);
    nb::class_<Copied, Source>(module, "Copied")
        .def(nb::init<Source &, const Copies &, Copies::Parts>(), nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 3>());
    nb::class_<Asked, Source>(module, "Asked").def(nb::init<nb::callable, nb::callable>());
    nb::class_<Guessed, Source>(module, "Guessed")
        .def(nb::init<>())
        .def("add", &Guessed::add)
        .def("clear", &Guessed::clear);
    nb::class_<Table>(module, "Table")
        .def("__init__", &make_table, nb::kw_only(), "counts"_a, "shares"_a, "rounded"_a, "tokens"_a,
             "vocabulary"_a, "bits"_a, "widest"_a, "wide"_a, "limit"_a, "expected"_a)
        .def("read", &Table::read, nb::call_guard<nb::gil_scoped_release>())
        .def("seal", &Table::seal, nb::call_guard<nb::gil_scoped_release>())
        .def("may_hold", &Table::may_hold)
        .def_prop_ro("ready", &Table::ready)
        .def_prop_ro("too_large", &Table::too_large)
        .def_prop_ro("bytes", &Table::bytes)
        .def("__len__", &Table::size);
    nb::class_<Statistics, Source>(module, "Statistics")
        .def(nb::init<nb::callable, nb::callable, const Table *, int, std::size_t>(), "ask"_a,
             "often"_a, "table"_a.none(), "longest"_a, "remembered"_a, nb::keep_alive<1, 4>());
    nb::class_<Calibration>(module, "Calibration")
        .def("__init__", &make_calibration, "weights"_a, "errors"_a, nb::kw_only(), "prior_observations"_a,
             "memory"_a, "unseen"_a, "least"_a, "trust_memory"_a, "ranges"_a);
    nb::class_<Drafter>(module, "Hierarchy")
        .def(nb::init<nb::list, const Calibration &, double, double, int, double, std::uint64_t,
                      nb::callable>(),
             "tiers"_a, "calibration"_a, nb::kw_only(), "negligible"_a, "slight"_a, "luckiest"_a,
             "temperature"_a, "seed"_a, "work"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("grow", &Drafter::grow)
        .def("chances", &Drafter::chances)
        .def("learn", &Drafter::learn)
        .def("forget", &Drafter::forget, nb::arg("suffixes").none());
    module.def("grow_all", &grow_all);
}
