// The planner's timeline (src/gradzip/planner/timeline.py is the reference and explains the rules), made for the inner
// loop of a search: the same plan again and again with one unit changed.
//
// Every unit has a class (its sizes); every class has the durations of every option's tasks. Options that provably
// cannot beat the best one so far are not simulated: see `bounds`.
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

struct Running {
    double end;
    int32_t unit;
    int16_t step;
    uint8_t resources;
};

class Simulator {
  public:
    explicit Simulator(const gz_plan_problem& problem) : p(problem), step_of(problem.units), asked(problem.units) {
        rounds.assign((size_t)p.options * p.stride, -1);
        round_count.assign(p.options, 0);
        for (int32_t o = 0; o < p.options; o++)
            for (int s = 0; s < p.counts[o]; s++)
                if (p.resources[(int64_t)o * p.stride + s] & kLinks)
                    rounds[(size_t)o * p.stride + round_count[o]++] = (int16_t)s;
        issued.resize(p.stride + 1);
    }

    // The end of the last task; `limit` ends a simulation that can only come out worse. Optional: when tasks start.
    double run(const int32_t* plan, double limit, double* starts) {
        for (auto& queue : queues) queue.clear();
        running_count = 0;
        busy = 0;
        computed = 0;
        computing = false;
        most_rounds = 0;
        for (int32_t u = 0; u < p.units; u++) {
            asked[u] = -1;
            if (round_count[plan[u]] > most_rounds) most_rounds = round_count[plan[u]];
        }
        std::memset(issued.data(), 0, issued.size() * sizeof issued[0]);
        double end = 0.0;
        dispatch(plan, 0.0, starts);
        while (running_count) {
            double now = running[0].end;
            for (int i = 1; i < running_count; i++)
                if (running[i].end < now) now = running[i].end;
            end = now;
            if (end > limit) return kNever;
            arrivals.clear();
            for (int i = 0; i < running_count;) {
                if (running[i].end != now) {
                    i++;
                    continue;
                }
                const Running done = running[i];
                running[i] = running[--running_count];
                busy &= (uint8_t)~done.resources;
                complete(plan, done);
            }
            release(plan);
            enqueue(plan);
            dispatch(plan, now, starts);
        }
        return end;
    }

  private:
    const gz_plan_problem& p;
    Queue queues[kResources];
    Running running[kResources];
    int running_count = 0;
    uint8_t busy = 0;
    int32_t computed = 0;
    bool computing = false;
    int most_rounds = 0;
    std::vector<int16_t> step_of, asked, rounds;
    std::vector<int> round_count;
    std::vector<int32_t> issued, arrivals;

    uint8_t mask(int32_t option, int step) const { return p.resources[(int64_t)option * p.stride + step]; }

    void complete(const int32_t* plan, const Running& done) {
        if (done.step < 0) {
            computed++;
            computing = false;
        }
        const int32_t option = plan[done.unit];
        const int step = done.step + 1;
        if (step == p.counts[option]) return;
        step_of[done.unit] = (int16_t)step;
        if (mask(option, step) & kLinks)
            asked[done.unit] = (int16_t)step;
        else
            arrivals.push_back(done.unit);
    }

    void release(const int32_t* plan) {
        for (int k = 0; k < most_rounds; k++)
            for (int32_t& unit = issued[k]; unit < computed; unit++) {
                const int32_t option = plan[unit];
                if (k >= round_count[option]) continue;
                if (asked[unit] != rounds[(size_t)option * p.stride + k]) break;
                asked[unit] = -1;
                arrivals.push_back(unit);
            }
    }

    void enqueue(const int32_t* plan) {
        for (size_t i = 1; i < arrivals.size(); i++)  // a handful, nearly sorted
            for (size_t j = i; j > 0 && arrivals[j] < arrivals[j - 1]; j--) std::swap(arrivals[j], arrivals[j - 1]);
        for (int32_t unit : arrivals) {
            const uint8_t wanted = mask(plan[unit], step_of[unit]);
            for (int r = 0; r < kResources; r++)
                if (wanted >> r & 1) queues[r].items.push_back(unit);
        }
    }

    void start(double now, int32_t unit, int step, uint8_t resources, double seconds) {
        running[running_count++] = {now + seconds, unit, (int16_t)step, resources};
        busy |= resources;
    }

    void dispatch(const int32_t* plan, double now, double* starts) {
        for (int r = 0; r < kResources; r++) {
            if (busy >> r & 1 || queues[r].empty()) continue;
            const int32_t unit = queues[r].items[queues[r].head];
            const int step = step_of[unit];
            const uint8_t wanted = mask(plan[unit], step);
            if (busy & wanted) continue;
            bool first = true;
            for (int q = 0; q < kResources; q++)
                if (wanted >> q & 1 && queues[q].items[queues[q].head] != unit) first = false;
            if (!first) continue;
            for (int q = 0; q < kResources; q++)
                if (wanted >> q & 1) queues[q].head++;
            if (starts) starts[(int64_t)unit * (p.stride + 1) + step + 1] = now;
            start(now, unit, step, wanted, duration(p, unit, plan[unit], step));
        }
        if (!computing && computed < p.units && !(busy >> kGpu & 1) && queues[kGpu].empty()) {
            computing = true;
            if (starts) starts[(int64_t)computed * (p.stride + 1)] = now;
            start(now, computed, -1, 1 << kGpu, p.backward[computed]);
        }
    }
};

// Least times: what units k and later do on a resource cannot begin before unit k is computed. bounds[r] is the largest
// such sum over k <= unit, without the tasks of `unit` itself, so that adding an option's work gives its bound.
void bounds(const gz_plan_problem& p, const double* work, const int32_t* plan, int32_t unit, double* result) {
    std::vector<double> ready(p.units);
    double total = 0.0;
    for (int32_t u = 0; u < p.units; u++) ready[u] = total += p.backward[u];
    double after[kResources] = {};
    for (int r = 0; r < kResources; r++) result[r] = 0.0;
    for (int32_t k = p.units - 1; k >= 0; k--) {
        const double* own = work + ((int64_t)p.classes[k] * p.options + plan[k]) * kResources;
        for (int r = 0; r < kResources; r++) {
            if (k != unit) after[r] += own[r];
            if (k <= unit && r != kGpu && ready[k] + after[r] > result[r]) result[r] = ready[k] + after[r];
        }
    }
    result[kGpu] = total + after[kGpu];
}

// The work of every class and option on every resource, then how long its tasks take one after the other.
std::vector<double> works(const gz_plan_problem& p) {
    std::vector<double> work((size_t)p.class_count * p.options * kResources);
    for (int64_t row = 0; row < (int64_t)p.class_count * p.options; row++) {
        const int64_t option = row % p.options;
        for (int s = 0; s < p.counts[option]; s++)
            for (int r = 0; r < kResources; r++)
                if (p.resources[option * p.stride + s] >> r & 1)
                    work[row * kResources + r] += p.seconds[row * p.stride + s];
    }
    return work;
}

// Sums in another order than the simulation's may come out higher by some units in the last place.
constexpr double kSlack = 1.0 - 1e-9;

}  // namespace

struct gz_planner {
    gz_plan_problem problem;
    Simulator simulator;
    std::vector<double> work;
    std::vector<int32_t> plan;
    explicit gz_planner(const gz_plan_problem& p) : problem(p), simulator(problem), work(works(p)), plan(p.units) {}
};

extern "C" {

GZ_API gz_planner* gz_plan_open(const gz_plan_problem* problem) { return new gz_planner(*problem); }

GZ_API void gz_plan_close(gz_planner* planner) { delete planner; }

GZ_API double gz_plan_time(gz_planner* planner, const int32_t* plan, double* starts) {
    return planner->simulator.run(plan, kNever, starts);
}

GZ_API int32_t gz_plan_best(gz_planner* planner, const int32_t* plan, int32_t unit, const int32_t* tried, int32_t count,
                            double* time) {
    const gz_plan_problem& p = planner->problem;
    double least[kResources];
    bounds(p, planner->work.data(), plan, unit, least);
    std::vector<int32_t>& changed = planner->plan;
    changed.assign(plan, plan + p.units);
    int32_t best = plan[unit];
    for (int32_t i = 0; i < count; i++) {
        const int32_t option = tried[i];
        if (option == plan[unit]) continue;
        const double* own = planner->work.data() + ((int64_t)p.classes[unit] * p.options + option) * kResources;
        bool hopeless = false;
        for (int r = 0; r < kResources; r++) hopeless |= (least[r] + own[r]) * kSlack >= *time;
        if (hopeless) continue;
        changed[unit] = option;
        const double found = planner->simulator.run(changed.data(), *time, nullptr);
        if (found < *time) {
            *time = found;
            best = option;
        }
    }
    return best;
}

GZ_API int64_t gz_plan_offload(gz_planner* planner, int32_t* plan, int32_t groups, const int32_t* starts,
                               const int32_t* members, const int32_t* offloaded, double* time) {
    std::vector<int32_t>& changed = planner->plan;
    changed.assign(plan, plan + planner->problem.units);
    std::vector<int32_t> best = changed;
    std::vector<int32_t> counts(groups, 0);
    int64_t tried = 0;
    for (;;) {
        const double found = planner->simulator.run(changed.data(), *time, nullptr);
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
