/* The headers are C++17 too: including them all, without a warning, is the test. */
#include "check.h"
#include "dion3.h"
#include "dion3_round.h"
#include "host_device.h"
#include "restarts.h"
#include "rows.h"
#include "selection.h"
#include "tri.h"

int main() { return d3_tri_tile(0).row == 0 && d3_selection_count(0.5, 4) == 2 ? 0 : 1; }
