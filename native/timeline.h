// The planner's timeline (src/gradzip/planner/timeline.py is the reference and explains the rules), made for the inner
// loop of a search: a simulation can stop where a unit's backward begins, and go on from there in different ways.
#ifndef GRADZIP_TIMELINE_H
#define GRADZIP_TIMELINE_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "planner.h"

namespace gradzip::planner {

constexpr int kResources = 8;
constexpr int kGpu = 0;
constexpr uint8_t kLinks = 0xf0;
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kNoise = 1e-9;  // gains below this part of a time are none, and well above what sums are off by

struct Event {
    double start, end;
    int32_t unit;
    int16_t step;  // -1: backward
    uint8_t resources;
};

// The seconds of every class and option on every resource; the last column is how long its tasks take together.
inline std::vector<double> works(const gz_plan_problem& p) {
    std::vector<double> work((size_t)p.class_count * p.options * (kResources + 1));
    for (int64_t row = 0; row < (int64_t)p.class_count * p.options; row++) {
        const int64_t option = row % p.options;
        double* own = work.data() + row * (kResources + 1);
        for (int s = 0; s < p.counts[option]; s++) {
            const double seconds = p.seconds[row * p.stride + s];
            for (int bits = p.resources[option * p.stride + s]; bits; bits &= bits - 1) own[__builtin_ctz(bits)] += seconds;
            own[kResources] += seconds;
        }
    }
    return work;
}

class Simulator {
  public:
    Simulator(const gz_plan_problem& problem, const std::vector<double>& work)
        : p(problem), work(work), assigned(p.units), rounds((size_t)p.options * p.stride, -1), round_count(p.options, 0) {
        for (int32_t o = 0; o < p.options; o++)
            for (int s = 0; s < p.counts[o]; s++)
                if (p.resources[(int64_t)o * p.stride + s] & kLinks)
                    rounds[(size_t)o * p.stride + round_count[o]++] = (int16_t)s;
        state.step_of.resize(p.units);
        state.asked.resize(p.units);
        state.issued.resize(p.stride + 1);
    }

    int32_t first_unit(int32_t decision) const {
        return (int32_t)(std::lower_bound(p.decisions, p.decisions + p.units, decision) - p.decisions);
    }

    // At the start of backward. An option p.options has no tasks: a decision that is still to be made.
    void begin(const int32_t* plan) {
        for (auto& queue : state.queues) queue.clear();
        state.running.clear();
        state.busy = state.waiting = 0;
        state.computed = 0;
        state.computing = false;
        state.most_rounds = 0;
        std::fill(state.left, state.left + kResources, 0.0);
        std::fill(state.asked.begin(), state.asked.end(), (int16_t)-1);
        std::fill(state.issued.begin(), state.issued.end(), 0);
        for (int32_t u = 0; u < p.units; u++) {
            state.left[kGpu] += p.backward[u];
            assign_unit(u, plan[p.decisions[u]]);
        }
        limit = kNever;
        log = nullptr;
        dispatch(0.0);
    }

    // Gives an option to a decision that had none, before the backward of its first unit is over.
    void assign(int32_t first_unit, int32_t option) {
        const int32_t decision = p.decisions[first_unit];
        for (int32_t u = first_unit; u < p.units && p.decisions[u] == decision; u++) assign_unit(u, option);
    }

    // Until nothing runs any more, or the backward of unit `until` begins. Returns the time that it is then, or infinity as
    // soon as the end cannot be before `most` by more than kNoise: what a resource has still to do takes its time.
    // Events are added in the order of their starts.
    double advance(double most, int32_t until, std::vector<Event>* events = nullptr) {
        limit = most * (1 - kNoise);
        late = false;
        log = events;
        double now = 0.0;
        std::vector<Running>& running = state.running;
        while (!running.empty() && !(state.computing && state.computed == until)) {
            now = running[0].end;
            for (size_t i = 1; i < running.size(); i++)
                if (running[i].end < now) now = running[i].end;
            if (now > limit) return kNever;
            arrivals.clear();
            bool stirred = false;
            for (size_t i = 0; i < running.size();) {
                if (running[i].end != now) {
                    i++;
                    continue;
                }
                const Running done = running[i];
                running[i] = running.back();
                running.pop_back();
                state.busy &= (uint8_t)~done.resources;
                stirred |= complete(done);
            }
            if (stirred) release();
            enqueue(now);
            dispatch(now);
            if (late) return kNever;
        }
        return now;
    }

    double run(const int32_t* plan, double most, std::vector<Event>* events = nullptr) {
        begin(plan);
        if (events) events->assign(1, {0.0, p.backward[0], 0, -1, 1 << kGpu});  // begin has started it
        return advance(most, p.units, events);
    }

    // What is kept of a simulation to go on from there again.
    class Queue {
      public:
        void clear() { items.clear(); head = 0; }
        bool empty() const { return head == items.size(); }
        int32_t front() const { return items[head]; }
        void push(int32_t unit) { items.push_back(unit); }
        void pop() {
            if (++head == items.size()) clear();
        }
        Queue() = default;
        Queue(const Queue& other) { *this = other; }
        Queue& operator=(const Queue& other) {  // only who still waits
            if (this != &other) {
                items.assign(other.items.begin() + (std::ptrdiff_t)other.head, other.items.end());
                head = 0;
            }
            return *this;
        }

      private:
        std::vector<int32_t> items;  // units; a unit waits in one place at a time
        size_t head = 0;
    };
    struct Running {
        double end;
        int32_t unit;
        int16_t step;
        uint8_t resources;
    };
    struct State {
        double left[kResources];  // seconds of tasks that have not begun, by resource
        Queue queues[kResources];
        std::vector<Running> running;  // one for each resource at the most, and delays
        uint8_t busy, waiting;         // resources in use, and those with a queue
        bool computing;
        int32_t computed;
        int most_rounds;
        std::vector<int16_t> step_of, asked;
        std::vector<int32_t> issued;
    };
    State state;

  private:
    struct Assigned {  // the tasks of a unit
        const double* seconds;
        const uint8_t* resources;
        const int16_t* rounds;
        int16_t tasks, round_count;
    };

    const gz_plan_problem& p;
    const std::vector<double>& work;
    std::vector<Assigned> assigned;
    std::vector<int16_t> rounds;
    std::vector<int16_t> round_count;
    std::vector<int32_t> arrivals;
    std::vector<Event>* log = nullptr;
    double limit = kNever;
    bool late = false;

    void assign_unit(int32_t unit, int32_t option) {
        if (option == p.options) {
            assigned[unit] = {nullptr, nullptr, nullptr, 0, 0};
            return;
        }
        const int64_t row = (int64_t)p.classes[unit] * p.options + option, tasks = (int64_t)option * p.stride;
        assigned[unit] = {p.seconds + row * p.stride, p.resources + tasks, rounds.data() + tasks, p.counts[option],
                          round_count[option]};
        if (round_count[option] > state.most_rounds) state.most_rounds = round_count[option];
        const double* own = work.data() + row * (kResources + 1);
        for (int r = 0; r < kResources; r++) state.left[r] += own[r];
    }

    // Whether others may now be released.
    bool complete(const Running& done) {
        if (done.step < 0) {
            state.computed++;
            state.computing = false;
        }
        const Assigned& own = assigned[done.unit];
        const int step = done.step + 1;
        if (step == own.tasks) return done.step < 0;
        state.step_of[done.unit] = (int16_t)step;
        if (own.resources[step] & kLinks) {
            state.asked[done.unit] = (int16_t)step;
            return true;
        }
        arrivals.push_back(done.unit);
        return done.step < 0;
    }

    void release() {
        for (int k = 0; k < state.most_rounds; k++)
            for (int32_t& unit = state.issued[k]; unit < state.computed; unit++) {
                const Assigned& own = assigned[unit];
                if (k >= own.round_count) continue;
                if (state.asked[unit] != own.rounds[k]) break;
                state.asked[unit] = -1;
                arrivals.push_back(unit);
            }
    }

    void enqueue(double now) {
        for (size_t i = 1; i < arrivals.size(); i++)  // a handful, nearly sorted
            for (size_t j = i; j > 0 && arrivals[j] < arrivals[j - 1]; j--) std::swap(arrivals[j], arrivals[j - 1]);
        for (int32_t unit : arrivals) {
            const int step = state.step_of[unit];
            const uint8_t wanted = assigned[unit].resources[step];
            if (!wanted) start(now, unit, step, 0, assigned[unit].seconds[step]);
            state.waiting |= wanted;
            for (int bits = wanted; bits; bits &= bits - 1) state.queues[__builtin_ctz(bits)].push(unit);
        }
    }

    void start(double now, int32_t unit, int step, uint8_t resources, double seconds) {
        state.running.push_back({now + seconds, unit, (int16_t)step, resources});
        if (log) log->push_back({now, now + seconds, unit, (int16_t)step, resources});
        state.busy |= resources;
        for (int bits = resources; bits; bits &= bits - 1) {
            double& left = state.left[__builtin_ctz(bits)];
            left -= seconds;
            late |= now + seconds + left > limit;
        }
    }

    void dispatch(double now) {
        for (int ready = state.waiting & ~state.busy; ready; ready &= ready - 1) {
            const int r = __builtin_ctz(ready);
            if (state.busy >> r & 1 || state.queues[r].empty()) continue;
            const int32_t unit = state.queues[r].front();
            const int step = state.step_of[unit];
            const uint8_t wanted = assigned[unit].resources[step];
            if (state.busy & wanted) continue;
            bool first = true;
            for (int bits = wanted; bits; bits &= bits - 1) first &= state.queues[__builtin_ctz(bits)].front() == unit;
            if (!first) continue;
            for (int bits = wanted; bits; bits &= bits - 1) {
                Queue& queue = state.queues[__builtin_ctz(bits)];
                queue.pop();
                if (queue.empty()) state.waiting &= (uint8_t)~(bits & -bits);
            }
            start(now, unit, step, wanted, assigned[unit].seconds[step]);
        }
        if (!state.computing && state.computed < p.units && !((state.busy | state.waiting) >> kGpu & 1)) {
            state.computing = true;
            start(now, state.computed, -1, 1 << kGpu, p.backward[state.computed]);
        }
    }
};

// Screening: the likely time of a plan when one decision is changed, from the longest paths of the plan as it is.
// Exact as long as nothing changes its order; good enough to say which options are worth a simulation.
class Screen {
  public:
    Screen(const gz_plan_problem& p, const std::vector<Event>& events, int32_t decision, int32_t first_unit) {
        double next[kResources] = {};  // the longest path from the next event on a resource to the end
        double last[kResources] = {};
        double free_at[kResources];    // when a resource that the decision does not use is done with what it does
        uint8_t used = 0;
        std::vector<double> following(p.units, 0.0);
        for (const Event& e : events)
            if (e.unit == first_unit && e.step < 0) {
                ready = e.end;
                break;
            }
        std::fill(free_at, free_at + kResources, ready);
        for (size_t i = events.size(); i-- > 0;) {
            const Event& e = events[i];
            const bool own = p.decisions[e.unit] == decision && e.step >= 0;
            double after = following[e.unit];
            for (int bits = e.resources; bits; bits &= bits - 1) after = std::max(after, next[__builtin_ctz(bits)]);
            const double whole = e.end - e.start + after;
            for (int bits = e.resources; bits; bits &= bits - 1) {
                const int r = __builtin_ctz(bits);
                if (own) {
                    if (!(used >> r & 1)) last[r] = next[r];
                    used |= (uint8_t)(1 << r);
                    path[r] = e.start + last[r];  // events come last to first: the first use counts in the end
                } else if (!(used >> r & 1) && e.start >= ready) {
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
            if (work[r] > 0) time = std::max(time, path[r] + work[r]);
        return time;
    }

  private:
    double ready = 0.0;
    double path[kResources] = {};  // the longest path through a decision's use of a resource, without that use itself
};

}  // namespace gradzip::planner
#endif
