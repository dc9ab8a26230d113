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

// Raised with every change of this file, so that a caller can tell a library that is older than itself.
#define GZ_PLAN_VERSION 2
GZ_API int32_t gz_plan_version(void);

GZ_API gz_planner* gz_plan_open(const gz_plan_problem* problem);
GZ_API void gz_plan_close(gz_planner* planner);

// The end of the last task when unit u takes option plan[decisions[u]]. starts, if not NULL: [units][stride + 1], when backward
// and each task of a unit start. Infinity if it is certain to be after `limit`.
GZ_API double gz_plan_time(gz_planner* planner, const int32_t* plan, double limit, double* starts);

// When the links of the mask `slow` fall idle before the last wait for a new unit, minus infinity if they never do. A wait
// counts only if that unit never waited for a link itself: otherwise earlier units may be to blame. through[d]: when the
// units of a decision have left these links.
GZ_API double gz_plan_bubble(gz_planner* planner, const int32_t* plan, uint8_t slow, double* through);

// The best of `count` options for one decision, all others as they are. *time is that of the plan as it is, and becomes
// that of the plan with the option returned. With simulated < count only that many, the likeliest, are simulated, and
// none if the plan without its units would save no more than `worth` seconds.
GZ_API int32_t gz_plan_best(gz_planner* planner, const int32_t* plan, int32_t decision, const int32_t* tried, int32_t count,
                            int32_t simulated, double worth, double* time);

// Tries every number of members of every group, the first ones of each, with their other option: members
// starts[g]..starts[g+1] belong to group g. Leaves the best plan in `plan` and its time in *time; returns how many
// plans were tried.
GZ_API int64_t gz_plan_offload(gz_planner* planner, int32_t* plan, int32_t groups, const int32_t* starts,
                               const int32_t* members, const int32_t* offloaded, double* time);

#ifdef __cplusplus
}
#endif
#endif
