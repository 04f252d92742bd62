// Circles of ranks that wait for each other, as values.
#include "check.h"
#include "control/wait_circle.h"

namespace {

using namespace farandole;

Wait wait_for(Wait::Kind kind, std::initializer_list<int> ranks, uint64_t key = 1) {
  Wait wait;
  wait.kind = kind;
  wait.key = key;
  for (const int r : ranks) wait.need(r);
  return wait;
}

std::optional<RankWaits> in(std::vector<Wait> waits) {
  RankWaits rank;
  rank.complete = true;
  rank.waits = std::move(waits);
  return rank;
}

std::vector<int> circle(int self, RanksWaits ranks, std::vector<bool> gone = {}) {
  gone.resize(ranks.size());
  return circle_of(self, ranks, gone);
}

const std::vector<int> kNone;
const std::vector<int> kBoth{0, 1};

}  // namespace

TEST(two_ranks_that_need_each_other_are_dead) {
  CHECK(circle(0, {in({wait_for(Wait::all, {1})}), in({wait_for(Wait::all, {0})})}) == kBoth);
}

TEST(a_rank_of_which_nothing_is_known_may_still_come) {
  CHECK(circle(0, {in({wait_for(Wait::all, {1})}), std::nullopt}) == kNone);
}

TEST(whoever_has_something_that_may_end_is_alive) {
  const Wait moves = wait_for(Wait::moving, {});
  CHECK(circle(0, {in({wait_for(Wait::all, {1})}), in({wait_for(Wait::all, {0}), moves})}) ==
        kNone);
  CHECK(circle(0, {in({wait_for(Wait::all, {1})}), in({})}) == kNone);
}

TEST(a_list_that_is_cut_proves_nothing) {
  auto cut = in({wait_for(Wait::all, {0})});
  cut->complete = false;
  CHECK(circle(0, {in({wait_for(Wait::all, {1})}), cut}) == kNone);
}

TEST(life_spreads_along_a_chain) {
  // 0 needs 1, 1 needs 2 or (in another thread) 0, and 2 runs.
  const auto chain = in({wait_for(Wait::all, {2}), wait_for(Wait::all, {0})});
  CHECK(circle(0, {in({wait_for(Wait::all, {1})}), chain, std::nullopt}) == kNone);
}

TEST(who_waits_for_a_circle_is_dead_and_the_circle_does_not_name_it) {
  const RanksWaits ranks{in({wait_for(Wait::all, {1})}), in({wait_for(Wait::all, {0})}),
                         in({wait_for(Wait::all, {0})})};
  CHECK(circle(0, ranks) == kBoth);
  CHECK((circle(2, ranks) == std::vector<int>{0, 1, 2}));
}

TEST(a_name_that_both_have_submitted_is_no_reason) {
  CHECK(circle(0, {in({wait_for(Wait::named, {1}, 7)}), in({wait_for(Wait::named, {0}, 7)})}) ==
        kNone);
  CHECK(circle(0, {in({wait_for(Wait::named, {1}, 7)}), in({wait_for(Wait::named, {0}, 8)})}) ==
        kBoth);
}

TEST(any_sender_is_enough) {
  const auto receives = in({wait_for(Wait::any, {1, 2})});
  const auto needs_0 = in({wait_for(Wait::all, {0})});
  CHECK(circle(0, {receives, needs_0, std::nullopt}) == kNone);
  CHECK((circle(0, {receives, needs_0, needs_0}) == std::vector<int>{0, 1, 2}));
}

TEST(who_has_left_sends_nothing) {
  const auto receives = in({wait_for(Wait::any, {1, 2})});
  const auto needs_0 = in({wait_for(Wait::all, {0})});
  CHECK(circle(0, {receives, needs_0, std::nullopt}, {false, false, true}) == kBoth);
}
