// Searches over plans: the best option of one decision, and of several together. See planner.h.
#include "planner.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "timeline.h"

using namespace gradzip::planner;

namespace {

// An option and its estimate; of equal ones that whose tasks take least together.
struct Likely {
    double estimate, work;
    int32_t option;
    bool operator<(const Likely& other) const {
        return std::tie(estimate, work, option) < std::tie(other.estimate, other.work, other.option);
    }
};

// Routes that keep the busiest resource equally long come out alike: one of them is enough.
bool alike(const Likely& one, const Likely& other) { return other.estimate <= one.estimate * (1 + kNoise); }

}  // namespace

struct gz_planner {
    gz_plan_problem problem;
    std::vector<double> work;
    Simulator simulator;
    std::vector<int32_t> plan;
    std::vector<Simulator::State> kept;  // where decisions are made, first to last
    std::vector<Event> events;
    std::vector<int32_t> logged;         // the plan that the events are of
    std::vector<Event> tail, best_tail;  // events from where options differ
    std::vector<Likely> likely;

    explicit gz_planner(const gz_plan_problem& p)
        : problem(p), work(works(p)), simulator(problem, work), plan(p.decision_count), kept(1) {}

    bool knows_events_of(const int32_t* wanted) const {
        return !logged.empty() && std::equal(logged.begin(), logged.end(), wanted);
    }

    const std::vector<Event>& events_of(const int32_t* wanted) {
        if (!knows_events_of(wanted)) {
            simulator.run(wanted, kNever, &events);
            logged.assign(wanted, wanted + problem.decision_count);
        }
        return events;
    }

    // Notes the events of a plan that differs in one decision, whose first unit that is: up to there nothing changes.
    void note_tail(int32_t first, int32_t decision, int32_t option) {
        auto same = std::find_if(events.begin(), events.end(), [first](const Event& e) { return e.unit == first && e.step < 0; });
        events.erase(same + 1, events.end());
        events.insert(events.end(), best_tail.begin(), best_tail.end());
        logged[decision] = option;
    }

    // Simulates all that does not depend on one decision.
    void begin_until(const int32_t* plan_, int32_t decision, int32_t first) {
        plan.assign(plan_, plan_ + problem.decision_count);
        plan[decision] = problem.options;
        simulator.begin(plan.data());
        simulator.advance(kNever, first);
        kept[0] = simulator.state;
    }

    // Goes on from there.
    double resume(int32_t first, int32_t option, double most, std::vector<Event>* tail_ = nullptr) {
        simulator.state = kept[0];
        simulator.assign(first, option);
        if (tail_) tail_->clear();
        return simulator.advance(most, problem.units, tail_);
    }
};

namespace {

// All combinations of options for some decisions, depth first: those that agree in early decisions share what they have
// in common, and a beginning that takes too long already is left with all that follows.
class Combinations {
  public:
    Combinations(gz_planner& planner, int32_t count, const int32_t* decisions, const int32_t* starts, const int32_t* options,
                 const int32_t* after, double time)
        : time(time), planner(planner), simulator(planner.simulator), count(count), starts(starts), options(options),
          after(after), taken(count) {
        for (int32_t i = 0; i < count; i++) first_units.push_back(simulator.first_unit(decisions[i]));
        first_units.push_back(planner.problem.units);
        if ((int32_t)planner.kept.size() < count) planner.kept.resize(count);
    }

    double time;
    std::vector<int32_t> best;  // numbers of options, empty if none is better
    int64_t tried = 0;

    void visit(int32_t i) {
        if (i == count) {
            tried++;
            return;
        }
        const bool free = after[i] < 0 || taken[after[i]] > 0;
        const int32_t choices = free ? starts[i + 1] - starts[i] : 1;
        if (choices > 1) planner.kept[i] = simulator.state;
        for (int32_t choice = 0; choice < choices; choice++) {
            if (choice) simulator.state = planner.kept[i];
            simulator.assign(first_units[i], options[starts[i] + choice]);
            taken[i] = choice;
            const double reached = simulator.advance(time, first_units[i + 1]);
            if (reached == kNever) continue;
            visit(i + 1);
            if (i + 1 == count && reached < time) {
                time = reached;
                best = taken;
            }
        }
    }

  private:
    gz_planner& planner;
    Simulator& simulator;
    int32_t count;
    const int32_t *starts, *options, *after;
    std::vector<int32_t> first_units, taken;
};

}  // namespace

extern "C" {

GZ_API gz_planner* gz_plan_open(const gz_plan_problem* problem) { return new gz_planner(*problem); }

GZ_API void gz_plan_close(gz_planner* planner) { delete planner; }

GZ_API double gz_plan_time(gz_planner* planner, const int32_t* plan, double limit, double* starts) {
    if (!starts) return planner->simulator.run(plan, limit);
    double time = 0.0;
    for (const Event& e : planner->events_of(plan)) {
        starts[(int64_t)e.unit * (planner->problem.stride + 1) + e.step + 1] = e.start;
        if (e.end > time) time = e.end;
    }
    return time;
}

GZ_API double gz_plan_bubble(gz_planner* planner, const int32_t* plan, uint8_t slow, double* through) {
    const gz_plan_problem& p = planner->problem;
    enum Link : uint8_t { kNone, kPrompt, kWaited };  // how a unit came to its first link
    std::vector<Link> came(p.units, kNone);
    std::vector<bool> on_slow(p.units, false);
    std::vector<double> before(p.units, 0.0);  // the end of a unit's task before the one at hand
    std::fill(through, through + p.decision_count, -kNever);
    double reached = -kNever, idle = -kNever;
    for (const Event& e : planner->events_of(plan)) {
        if (e.step >= 0 && e.resources & kLinks && came[e.unit] == kNone)
            came[e.unit] = e.start <= before[e.unit] * (1 + 1e-12) ? kPrompt : kWaited;
        before[e.unit] = e.end;
        if (e.step < 0 || !(e.resources & slow)) continue;
        const bool is_new = !on_slow[e.unit] && came[e.unit] == kPrompt;
        on_slow[e.unit] = true;
        if (is_new && reached > -kNever && e.start > reached * (1 + 1e-9)) idle = reached;
        if (e.end > reached) reached = e.end;
        double& left = through[p.decisions[e.unit]];
        if (e.end > left) left = e.end;
    }
    return idle;
}

GZ_API int32_t gz_plan_best(gz_planner* planner, const int32_t* plan, int32_t decision, const int32_t* tried, int32_t count,
                            int32_t simulated, double worth, double* time) {
    const gz_plan_problem& p = planner->problem;
    auto& likely = planner->likely;
    likely.clear();
    const int32_t first = planner->simulator.first_unit(decision), present = plan[decision];
    const bool screened = simulated < count;
    if (screened) {
        const Screen screen(p, planner->events_of(plan), decision, first);
        for (int32_t i = 0; i < count; i++) {
            if (tried[i] == present) continue;
            double work[kResources + 1] = {};
            for (int32_t u = first; u < p.units && p.decisions[u] == decision; u++) {
                const double* own = planner->work.data() + ((int64_t)p.classes[u] * p.options + tried[i]) * (kResources + 1);
                for (int r = 0; r <= kResources; r++) work[r] += own[r];
            }
            const double estimate = screen.estimate(work);
            if (*time - estimate > worth) likely.push_back({estimate, work[kResources], tried[i]});
        }
        std::sort(likely.begin(), likely.end());
        likely.erase(std::unique(likely.begin(), likely.end(), alike), likely.end());
        if (likely.size() > (size_t)simulated) likely.resize(simulated);
    } else {
        for (int32_t i = 0; i < count; i++)
            if (tried[i] != present) likely.push_back({0.0, 0.0, tried[i]});
    }
    if (likely.empty()) return present;
    planner->begin_until(plan, decision, first);
    int32_t best = present;
    double without = -kNever;  // the time if it did nothing at all, once that is known
    for (const Likely& candidate : likely) {
        if (screened && *time - std::max(candidate.estimate, without) <= worth) break;
        const double found = planner->resume(first, candidate.option, *time, screened ? &planner->tail : nullptr);
        if (found < *time) {
            *time = found;
            best = candidate.option;
            planner->tail.swap(planner->best_tail);
        } else if (screened && without == -kNever) {
            without = planner->resume(first, p.options, *time - worth);
        }
    }
    if (screened && best != present) planner->note_tail(first, decision, best);
    return best;
}

GZ_API void gz_plan_rank(gz_planner* planner, const int32_t* plan, int32_t decision, int32_t count, int32_t* best) {
    const int32_t first = planner->simulator.first_unit(decision);
    planner->begin_until(plan, decision, first);
    auto& ranked = planner->likely;
    ranked.clear();
    for (int32_t option = 0; option < planner->problem.options; option++) {
        const bool full = (int32_t)ranked.size() == count;
        const double found = planner->resume(first, option, full ? ranked.back().estimate : kNever);
        if (found == kNever) continue;
        if (full) ranked.pop_back();
        const Likely entry{found, 0.0, option};
        ranked.insert(std::upper_bound(ranked.begin(), ranked.end(), entry), entry);
    }
    for (int32_t i = 0; i < count; i++) best[i] = ranked[i].option;
}

GZ_API int64_t gz_plan_combine(gz_planner* planner, int32_t* plan, int32_t count, const int32_t* decisions,
                               const int32_t* starts, const int32_t* options, const int32_t* after, double* time) {
    const gz_plan_problem& p = planner->problem;
    std::vector<int32_t>& open = planner->plan;
    open.assign(plan, plan + p.decision_count);
    for (int32_t i = 0; i < count; i++) open[decisions[i]] = p.options;
    Combinations all(*planner, count, decisions, starts, options, after, *time);
    planner->simulator.begin(open.data());
    planner->simulator.advance(kNever, planner->simulator.first_unit(decisions[0]));
    all.visit(0);
    for (int32_t i = 0; i < (int32_t)all.best.size(); i++) plan[decisions[i]] = options[starts[i] + all.best[i]];
    *time = all.time;
    return all.tried;
}

}  // extern "C"
