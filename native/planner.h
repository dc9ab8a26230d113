// The planner's inner loop: timelines of plans, and the best option of one unit. See planner.cpp.
#ifndef GRADZIP_PLANNER_H
#define GRADZIP_PLANNER_H

#include "gradzip.h"

#ifdef __cplusplus
extern "C" {
#endif

// Units in the order in which they are computed; several may share one decision, as the chunks of a bucket do. A plan
// holds the option of every decision. All arrays stay with the caller and must outlive the planner.
typedef struct {
    int32_t units, decision_count, class_count, options;
    int32_t stride;             // most tasks of an option
    const double* backward;     // [units] seconds that each computes for
    const int32_t* decisions;   // [units], rising from 0
    const int32_t* classes;     // [units]
    const uint8_t* counts;      // [options] tasks
    const uint8_t* resources;   // [options][stride] one bit for each of eight resources, the upper four are links; none: a delay
    const double* seconds;      // [class_count][options][stride]
} gz_plan_problem;

typedef struct gz_planner gz_planner;

GZ_API gz_planner* gz_plan_open(const gz_plan_problem* problem);
GZ_API void gz_plan_close(gz_planner* planner);

// The end of the last task when unit u takes option plan[decisions[u]]. starts, if not NULL: [units][stride + 1], when backward
// and each task of a unit start. Infinity if it is certain not to be before `limit` by more than 1e-9 of it.
GZ_API double gz_plan_time(gz_planner* planner, const int32_t* plan, double limit, double* starts);

// When the links of the mask `slow` fall idle before the last wait for a new unit, minus infinity if they never do. A wait
// counts only if that unit never waited for a link itself: otherwise earlier units may be to blame. through[d]: when the
// units of a decision have left these links.
GZ_API double gz_plan_bubble(gz_planner* planner, const int32_t* plan, uint8_t slow, double* through);

// The best of `count` options for one decision, all others as they are. *time is that of the plan as it is, and becomes
// that of the plan with the option returned. With simulated < count all are estimated, and at most that many, the likeliest,
// are simulated, if they promise to save more than `worth` seconds and the plan without its units would.
GZ_API int32_t gz_plan_best(gz_planner* planner, const int32_t* plan, int32_t decision, const int32_t* tried, int32_t count,
                            int32_t simulated, double worth, double* time);

// The `count` best of all options for one decision, best first, all others as they are.
GZ_API void gz_plan_rank(gz_planner* planner, const int32_t* plan, int32_t decision, int32_t count, int32_t* best);

// Tries all combinations of options for `count` decisions, which rise; decision i has options[starts[i]..starts[i+1]). Where
// after[i] >= 0, only the first of them unless decision number after[i] < i took another than its first. Leaves the best
// plan that takes less than *time in `plan` and its time in *time; returns how many plans were simulated to their end.
GZ_API int64_t gz_plan_combine(gz_planner* planner, int32_t* plan, int32_t count, const int32_t* decisions,
                               const int32_t* starts, const int32_t* options, const int32_t* after, double* time);

#ifdef __cplusplus
}
#endif
#endif
