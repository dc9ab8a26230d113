// The planner's timeline (src/gradzip/planner/timeline.py is the reference and explains the rules), made for the inner
// loop of a search: the same plan again and again with one unit changed.
//
// Every unit has a class (its sizes); every class has the durations of every option's tasks.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "planner.h"

namespace {

constexpr int kResources = 8;
constexpr int kGpu = 0;
constexpr uint8_t kLinks = 0xf0;
constexpr double kNever = std::numeric_limits<double>::infinity();

double duration(const gz_plan_problem& p, int32_t unit, int32_t option, int step) {
    const int64_t row = (int64_t)p.classes[unit] * p.options + option;
    return p.seconds[row * p.stride + step];
}

struct Queue {
    std::vector<int32_t> items;  // units; a unit waits in one place at a time
    size_t head = 0;
    void clear() { items.clear(); head = 0; }
    bool empty() const { return head == items.size(); }
};

struct Event {
    double start, end;
    int32_t unit;
    int16_t step;
    uint8_t resources;
};

struct Running {
    double end;
    int32_t unit;
    int16_t step;
    uint8_t resources;
};

class Simulator {
  public:
    Simulator(const gz_plan_problem& problem, const std::vector<double>& work)
        : p(problem), work(work) {
        state.step_of.resize(p.units);
        state.asked.resize(p.units);
        rounds.assign((size_t)p.options * p.stride, -1);
        round_count.assign(p.options + 1, 0);  // one more: nothing at all
        for (int32_t o = 0; o < p.options; o++)
            for (int s = 0; s < p.counts[o]; s++)
                if (p.resources[(int64_t)o * p.stride + s] & kLinks)
                    rounds[(size_t)o * p.stride + round_count[o]++] = (int16_t)s;
        state.issued.resize(p.stride + 1);
    }

    // The end of the last task; `limit` ends a simulation that can only come out later: what a resource has still to do
    // takes at least its time. Events come in order of start.
    double run(const int32_t* plan, double limit, std::vector<Event>* events = nullptr) {
        log = events;
        if (log) log->clear();
        begin(plan);
        const double end = advance(plan, limit, p.units);
        log = nullptr;
        return end;
    }

    // Simulates until the backward of a unit begins: all that does not depend on what that unit does then.
    void begin_until(const int32_t* plan, int32_t unit) {
        begin(plan);
        advance(plan, kNever, unit);
        kept = state;
    }

    // Goes on from there with another option for the decision of that unit, which had none.
    double resume(const int32_t* plan, int32_t unit, double limit) {
        state = kept;
        const int32_t decision = p.decisions[unit], option = plan[decision];
        if (option < p.options) {
            if (round_count[option] > state.most_rounds) state.most_rounds = round_count[option];
            for (int32_t u = unit; u < p.units && p.decisions[u] == decision; u++) add_work(u, option);
        }
        return advance(plan, limit, p.units);
    }

  private:
    struct State {
        double left[kResources];  // seconds of tasks that have not begun, by resource
        double free_at[kResources];
        Queue queues[kResources];
        std::vector<Running> running;  // one for each resource at the most, and delays
        uint8_t busy;
        int32_t computed;
        bool computing;
        int most_rounds;
        std::vector<int16_t> step_of, asked;
        std::vector<int32_t> issued;
    };

    const gz_plan_problem& p;
    const std::vector<double>& work;
    State state, kept;
    std::vector<int16_t> rounds;
    std::vector<int> round_count;
    std::vector<int32_t> arrivals;
    std::vector<Event>* log = nullptr;

    void begin(const int32_t* plan) {
        for (auto& queue : state.queues) queue.clear();
        state.running.clear();
        state.busy = 0;
        state.computed = 0;
        state.computing = false;
        state.most_rounds = 0;
        for (int r = 0; r < kResources; r++) state.left[r] = state.free_at[r] = 0.0;
        for (int32_t u = 0; u < p.units; u++) {
            state.asked[u] = -1;
            state.left[kGpu] += p.backward[u];
            const int32_t option = plan[p.decisions[u]];
            if (option == p.options) continue;
            if (round_count[option] > state.most_rounds) state.most_rounds = round_count[option];
            add_work(u, option);
        }
        std::memset(state.issued.data(), 0, state.issued.size() * sizeof state.issued[0]);
        dispatch(plan, 0.0);
    }

    // Until nothing runs any more, or the backward of `until` begins.
    double advance(const int32_t* plan, double limit, int32_t until) {
        const bool limited = limit < kNever;
        limit *= 1 + 1e-9;  // what is left is counted by subtraction
        double end = 0.0;
        std::vector<Running>& running = state.running;
        while (!running.empty() && !(state.computing && state.computed == until)) {
            double now = running[0].end;
            for (const Running& r : running)
                if (r.end < now) now = r.end;
            end = now;
            if (end > limit || (limited && least_end(now) > limit)) return kNever;
            arrivals.clear();
            for (size_t i = 0; i < running.size();) {
                if (running[i].end != now) {
                    i++;
                    continue;
                }
                const Running done = running[i];
                running[i] = running.back();
                running.pop_back();
                state.busy &= (uint8_t)~done.resources;
                complete(plan, done);
            }
            release(plan);
            enqueue(plan, now);
            dispatch(plan, now);
        }
        return end;
    }

    void add_work(int32_t unit, int32_t option) {
        const double* own = work.data() + ((int64_t)p.classes[unit] * p.options + option) * (kResources + 1);
        for (int r = 0; r < kResources; r++) state.left[r] += own[r];
    }

    double least_end(double now) const {
        double least = now;
        for (int r = 0; r < kResources; r++) {
            const double end = (state.free_at[r] > now ? state.free_at[r] : now) + state.left[r];
            if (end > least) least = end;
        }
        return least;
    }

    uint8_t mask(int32_t option, int step) const { return p.resources[(int64_t)option * p.stride + step]; }

    void complete(const int32_t* plan, const Running& done) {
        if (done.step < 0) {
            state.computed++;
            state.computing = false;
        }
        const int32_t option = plan[p.decisions[done.unit]];
        const int step = done.step + 1;
        if (option == p.options || step == p.counts[option]) return;
        state.step_of[done.unit] = (int16_t)step;
        if (mask(option, step) & kLinks)
            state.asked[done.unit] = (int16_t)step;
        else
            arrivals.push_back(done.unit);
    }

    void release(const int32_t* plan) {
        for (int k = 0; k < state.most_rounds; k++)
            for (int32_t& unit = state.issued[k]; unit < state.computed; unit++) {
                const int32_t option = plan[p.decisions[unit]];
                if (k >= round_count[option]) continue;
                if (state.asked[unit] != rounds[(size_t)option * p.stride + k]) break;
                state.asked[unit] = -1;
                arrivals.push_back(unit);
            }
    }

    void enqueue(const int32_t* plan, double now) {
        for (size_t i = 1; i < arrivals.size(); i++)  // a handful, nearly sorted
            for (size_t j = i; j > 0 && arrivals[j] < arrivals[j - 1]; j--) std::swap(arrivals[j], arrivals[j - 1]);
        for (int32_t unit : arrivals) {
            const int32_t option = plan[p.decisions[unit]];
            const uint8_t wanted = mask(option, state.step_of[unit]);
            if (!wanted) start(now, unit, state.step_of[unit], 0, duration(p, unit, option, state.step_of[unit]));
            for (int bits = wanted; bits; bits &= bits - 1) state.queues[__builtin_ctz(bits)].items.push_back(unit);
        }
    }

    void start(double now, int32_t unit, int step, uint8_t resources, double seconds) {
        state.running.push_back({now + seconds, unit, (int16_t)step, resources});
        if (log) log->push_back({now, now + seconds, unit, (int16_t)step, resources});
        state.busy |= resources;
        for (int bits = resources; bits; bits &= bits - 1) {
            const int r = __builtin_ctz(bits);
            state.left[r] -= seconds;
            state.free_at[r] = now + seconds;
        }
    }

    void dispatch(const int32_t* plan, double now) {
        for (int r = 0; r < kResources; r++) {
            if (state.busy >> r & 1 || state.queues[r].empty()) continue;
            const int32_t unit = state.queues[r].items[state.queues[r].head];
            const int step = state.step_of[unit];
            const uint8_t wanted = mask(plan[p.decisions[unit]], step);
            if (state.busy & wanted) continue;
            bool first = true;
            for (int q = 0; q < kResources; q++)
                if (wanted >> q & 1 && state.queues[q].items[state.queues[q].head] != unit) first = false;
            if (!first) continue;
            for (int q = 0; q < kResources; q++)
                if (wanted >> q & 1) state.queues[q].head++;
            start(now, unit, step, wanted, duration(p, unit, plan[p.decisions[unit]], step));
        }
        if (!state.computing && state.computed < p.units && !(state.busy >> kGpu & 1) && state.queues[kGpu].empty()) {
            state.computing = true;
            start(now, state.computed, -1, 1 << kGpu, p.backward[state.computed]);
        }
    }
};

// Screening: the likely time of a plan when one decision is changed, from the longest paths of the plan as it is.
// Exact as long as nothing changes its order; good enough to say which options are worth a simulation.
class Screen {
  public:
    Screen(const gz_plan_problem& p, const std::vector<Event>& events, int32_t decision) {
        double next[kResources] = {};  // the longest path from the next event on a resource to the end
        double last[kResources] = {};
        double free_at[kResources];    // when a resource that the decision does not use is done with what it does
        bool used[kResources] = {};
        std::vector<double> following(p.units, 0.0);
        for (size_t i = events.size(); i-- > 0;)
            if (p.decisions[events[i].unit] == decision && events[i].step < 0) ready = events[i].end;
        for (int r = 0; r < kResources; r++) free_at[r] = ready;
        for (size_t i = events.size(); i-- > 0;) {
            const Event& e = events[i];
            double after = following[e.unit];
            for (int r = 0; r < kResources; r++)
                if (e.resources >> r & 1 && next[r] > after) after = next[r];
            const double whole = e.end - e.start + after;
            for (int r = 0; r < kResources; r++) {
                if (!(e.resources >> r & 1)) continue;
                if (p.decisions[e.unit] == decision && e.step >= 0) {
                    if (!used[r]) last[r] = next[r];
                    used[r] = true;
                    path[r] = e.start + last[r];  // events come last to first: the first use counts in the end
                } else if (!used[r] && e.start >= ready) {
                    path[r] = e.start + whole;  // a new task would push back all that follows
                } else if (e.end > free_at[r]) {
                    free_at[r] = e.end;
                }
                next[r] = whole;
            }
            following[e.unit] = whole;
        }
        for (int r = 0; r < kResources; r++)
            if (path[r] == 0.0) path[r] = free_at[r];
    }

    double estimate(const double* work) const {
        double time = ready + work[kResources];
        for (int r = 0; r < kResources; r++)
            if (work[r] > 0 && path[r] + work[r] > time) time = path[r] + work[r];
        return time;
    }

  private:
    double ready = 0.0;
    double path[kResources] = {};  // the longest path through a decision's use of a resource, without that use itself
};

// The work of every class and option on every resource; the last column is how long its tasks take together.
std::vector<double> works(const gz_plan_problem& p) {
    std::vector<double> work((size_t)p.class_count * p.options * (kResources + 1));
    for (int64_t row = 0; row < (int64_t)p.class_count * p.options; row++) {
        const int64_t option = row % p.options;
        double* own = work.data() + row * (kResources + 1);
        for (int s = 0; s < p.counts[option]; s++) {
            const double seconds = p.seconds[row * p.stride + s];
            for (int r = 0; r < kResources; r++)
                if (p.resources[option * p.stride + s] >> r & 1) own[r] += seconds;
            own[kResources] += seconds;
        }
    }
    return work;
}

}  // namespace

struct gz_planner {
    gz_plan_problem problem;
    std::vector<double> work;
    Simulator simulator;
    std::vector<int32_t> plan;
    std::vector<Event> events;
    std::vector<int32_t> logged;  // the plan that the events are of
    std::vector<std::pair<double, int32_t>> likely;
    explicit gz_planner(const gz_plan_problem& p) : problem(p), work(works(p)), simulator(problem, work), plan(p.decision_count) {}

    const std::vector<Event>& events_of(const int32_t* wanted) {
        if (logged.empty() || !std::equal(logged.begin(), logged.end(), wanted)) {
            simulator.run(wanted, kNever, &events);
            logged.assign(wanted, wanted + problem.decision_count);
        }
        return events;
    }
};

extern "C" {

GZ_API int32_t gz_plan_version(void) { return GZ_PLAN_VERSION; }

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
    std::vector<int32_t>& changed = planner->plan;
    changed.assign(plan, plan + p.decision_count);
    auto& likely = planner->likely;
    likely.clear();
    const int32_t first = (int32_t)(std::lower_bound(p.decisions, p.decisions + p.units, decision) - p.decisions);
    changed[decision] = p.options;
    planner->simulator.begin_until(changed.data(), first);
    if (simulated < count) {
        const double without = planner->simulator.resume(changed.data(), first, *time - worth);
        if (*time - without <= worth) return plan[decision];  // whatever it does, nothing is gained
        const Screen screen(p, planner->events_of(plan), decision);
        for (int32_t i = 0; i < count; i++) {
            double work[kResources + 1] = {};
            for (int32_t u = first; u < p.units && p.decisions[u] == decision; u++) {
                const int64_t row = (int64_t)p.classes[u] * p.options + tried[i];
                for (int r = 0; r <= kResources; r++) work[r] += planner->work[row * (kResources + 1) + r];
            }
            const double estimate = screen.estimate(work);
            likely.emplace_back(estimate > without ? estimate : without, tried[i]);
        }
        std::partial_sort(likely.begin(), likely.begin() + simulated, likely.end());
        likely.resize(simulated);
    } else {
        for (int32_t i = 0; i < count; i++) likely.emplace_back(0.0, tried[i]);
    }
    int32_t best = plan[decision];
    for (const auto& candidate : likely) {
        if (candidate.second == plan[decision]) continue;
        changed[decision] = candidate.second;
        const double found = planner->simulator.resume(changed.data(), first, *time);
        if (found < *time) {
            *time = found;
            best = candidate.second;
        }
    }
    return best;
}

GZ_API int64_t gz_plan_offload(gz_planner* planner, int32_t* plan, int32_t groups, const int32_t* starts,
                               const int32_t* members, const int32_t* offloaded, double* time) {
    std::vector<int32_t>& changed = planner->plan;
    changed.assign(plan, plan + planner->problem.decision_count);
    std::vector<int32_t> best = changed;
    std::vector<int32_t> counts(groups, 0);
    int64_t tried = 0;
    for (;;) {
        const double found = planner->simulator.run(changed.data(), *time);
        tried++;
        if (found < *time) {
            *time = found;
            best = changed;
        }
        int32_t g = 0;
        for (; g < groups; g++) {  // the next vector of counts: one more member of the first group that has one left
            const int32_t size = starts[g + 1] - starts[g];
            if (counts[g] < size) {
                const int32_t at = starts[g] + counts[g]++;
                changed[members[at]] = offloaded[at];
                break;
            }
            counts[g] = 0;
            for (int32_t at = starts[g]; at < starts[g + 1]; at++) changed[members[at]] = plan[members[at]];
        }
        if (g == groups) break;
    }
    std::memcpy(plan, best.data(), best.size() * sizeof best[0]);
    return tried;
}

}  // extern "C"
